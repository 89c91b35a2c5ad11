"""Moves of running requests, whichever router has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from remora.deployments.moves import Moved
from remora.deployments.router import RouterCore
from remora.platform.base.errors import RemoraError, RequestError, Unavailable, named_error
from remora.platform.base.ids import ReplicaId, SessionId


class RunningMoves(Protocol):
    """Asks every router, this one included."""

    async def move(self, session_id: SessionId, target: ReplicaId) -> Moved | None:
        """None: no router has a running request of the session. Raises what `Moves.move` does."""
        ...


class OwnMoves:
    """RunningMoves of a router that is alone."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    async def move(self, session_id: SessionId, target: ReplicaId) -> Moved | None:
        stream = self._core.stream_of(session_id)
        return None if stream is None else await self._core.moves.move(stream, target)


class _Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An error of Moves.move, as it crosses between routers."""

    error: str
    message: str
    field: str | None = None


class _Outcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`moved` is None where the router has no running request of the session."""

    moved: Moved | None


async def move_encoded(core: RouterCore, session_id: str, target: str) -> bytes:
    """OwnMoves.move for another router; `decode_moves` reads the answers."""
    try:
        moved = await OwnMoves(core).move(SessionId(session_id), ReplicaId(target))
    except RemoraError as error:
        field = error.field if isinstance(error, RequestError) else None
        return msgspec.msgpack.encode(_Refusal(error=type(error).__name__, message=str(error), field=field))
    return msgspec.msgpack.encode(_Outcome(moved=moved))


def decode_moves(answers: Sequence[bytes]) -> Moved | None:
    """What the one router that had the request said. Raises the error that it met."""
    for answer in answers:
        match msgspec.msgpack.decode(answer, type=_Outcome | _Refusal):
            case _Outcome(moved=moved) if moved is not None:
                return moved
            case _Refusal(error=name, message=message, field=field):
                found = named_error(name, message, field=field)
                raise found if isinstance(found, (RequestError, Unavailable)) else RemoraError(message)
    return None
