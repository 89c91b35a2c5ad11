"""A router's way to the sessions: one call a command, said again while the registry restarts."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, Protocol, TypeVar

import msgspec
from ray.exceptions import RayError

from remora.namespaces.session_commands import SessionAnswer, SessionCommand, SessionRefused
from remora.platform.base.errors import RemoraError, RequestError, Unavailable, named_error

_encoder = msgspec.msgpack.Encoder()
_answer_decoder = msgspec.msgpack.Decoder(SessionAnswer)
#: A registry that was killed is back within seconds.
_RETRY_FOR_S: Final = 15.0
A = TypeVar("A")


class SessionPort(Protocol):
    """Where session commands go."""

    async def call(self, command: SessionCommand) -> SessionAnswer: ...


async def ask(port: SessionPort, command: SessionCommand, kind: type[A]) -> A:
    """The answer of the kind that belongs to the command. Raises what a refusal says, from the error tree."""
    answer = await port.call(command)
    if isinstance(answer, SessionRefused):
        raise error_of(answer)
    assert isinstance(answer, kind), f"{type(command).__name__} was answered by {type(answer).__name__}"
    return answer


def error_of(refused: SessionRefused) -> RemoraError:
    """A refusal as the exception it names."""
    error = named_error(refused.error, refused.message, field=refused.field, retry_after_s=5.0)
    return error if isinstance(error, (RequestError, Unavailable)) else RemoraError(refused.message)


class RegistrySessions:
    """The SessionPort of a cluster: its registry actor."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    async def call(self, command: SessionCommand) -> SessionAnswer:
        """Raises Unavailable when the registry stays away."""
        data = _encoder.encode(command)
        give_up_s = time.monotonic() + _RETRY_FOR_S
        while True:
            try:
                return _answer_decoder.decode(await self._registry.session_call.remote(data))
            except RayError as error:
                if time.monotonic() >= give_up_s:
                    reason = str(error).partition("\n")[0]
                    raise Unavailable(f"the session registry cannot be reached: {reason}") from None
                await asyncio.sleep(0.2)
