"""Calling a pool actor that may just be coming back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError, RayTaskError

from remora.cache_actors.device_resources import select_gpu
from remora.cache_actors.pool_messages import KVFormats, PoolBinding
from remora.platform.base.errors import ArenaError, Unavailable

logger = logging.getLogger(__name__)

_MAX_PAUSE_S: Final = 0.5
#: An actor that restarts is unavailable, one that says this often it is dead does not come back.
_MAX_DEATHS: Final = 5


async def until_answered(call: Callable[[], Any]) -> bytes:
    """Repeats a call until the pool answers it: a pool that died comes back (design §4.6), with its numbering.

    Raises what the method raised, ActorDiedError when the actor was ended for good, ActorUnschedulableError when its
    node is gone.
    """
    pause_s = 0.02
    deaths = 0
    while True:
        try:
            answer: bytes = await call()
            return answer
        except RayTaskError as error:
            if not isinstance(error.cause, Unavailable):
                raise
            logger.warning("the pool cannot take the call now, trying again: %s", error.cause)
        except RayError as error:
            deaths = deaths + 1 if isinstance(error, ActorDiedError | ActorUnschedulableError) else 0
            if deaths > _MAX_DEATHS:
                raise
            logger.warning("the pool cannot be reached, trying again: %s", str(error).partition("\n")[0])
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


async def ask_kv_formats(pool: Any, *, timeout_s: float) -> KVFormats:
    """What the pool says of the shapes of KV. Raises Unavailable when it does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await until_answered(pool.kv_formats.remote)
    except (RayError, TimeoutError) as error:
        raise Unavailable(f"the pool does not answer: {str(error).partition(chr(10))[0]}") from None
    return msgspec.msgpack.decode(answer, type=KVFormats)


async def await_pool(pool: Any) -> PoolBinding:
    """Waits until a pool has started. Raises ArenaError with the reason when it could not."""
    try:
        return msgspec.msgpack.decode(await until_answered(pool.binding.remote), type=PoolBinding)
    except ActorDiedError as error:
        marker = "remora.platform.base.errors."
        lines = [line for line in str(error).splitlines() if marker in line]
        reason = lines[-1].partition(marker)[2] if lines else str(error)
        raise ArenaError(f"the pool did not start: {reason}") from error


async def select_gpu_of(pool: Any) -> None:
    """Waits until a pool has started; a pool's GPU is then the one that this process sees. Raises ArenaError."""
    select_gpu((await await_pool(pool)).device_uuid)
