"""A lease's calls to its pool: over a link of their own, through Ray where there is none.

    PoolClient ── call ──► PoolCallLink ── CALL over the link ──► PoolCallServer ──► PoolActor.call
                                        └─ Ray, until answered ─────────────────────►

A call that a broken link has left open is made again through Ray under the same numbers, so that the pool does nothing
twice. Links are Ray's to hand out: a pool that restarts listens elsewhere, and is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec
from ray.exceptions import RayError

from remora.cache_actors.byte_link import LinkAddress
from remora.cache_actors.loop_link import LoopLink, LoopLinkServer, connect_link
from remora.cache_actors.pool_calls import until_answered
from remora.platform.base.errors import RemoraError, Unavailable
from remora.platform.base.ids import LeaseId

logger = logging.getLogger(__name__)

_CALL: Final = 0
_OPEN_TIMEOUT_S: Final = 1.0
#: A pool that could not be linked to, or whose link broke, is called through Ray for so long.
_RETRY_S: Final = 5.0


class PoolCall(msgspec.Struct, frozen=True):
    """The arguments of PoolActor.call."""

    lease_id: LeaseId
    data: bytes
    event_no: int


class PoolCallLink:
    """The caller's side. One call at a time."""

    def __init__(self, pool: Any, lease_id: LeaseId) -> None:
        self._pool = pool
        self._lease_id = lease_id
        self._link: LoopLink | None = None
        self._silent_until_s = 0.0

    async def call(self, data: bytes, event_no: int) -> bytes:
        """PoolActor.call, until the pool answers it; raises as `until_answered`."""
        link = await self._open_link()
        if link is not None:
            try:
                return await link.ask(_CALL, msgspec.msgpack.encode(PoolCall(self._lease_id, data, event_no)))
            except RemoraError as error:
                self._give_up(error)
        return await until_answered(partial(self._pool.call.remote, self._lease_id, data, event_no))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    async def _open_link(self) -> LoopLink | None:
        if self._link is not None and self._link.is_open:
            return self._link
        if time.monotonic() < self._silent_until_s:
            return None
        link = LoopLink()
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                answer = await self._pool.open_calls.remote()
                address = msgspec.msgpack.decode(answer, type=LinkAddress | None)
                if address is None:
                    self._silent_until_s = math.inf
                    return None
                await connect_link(address, link)
        except (Unavailable, TimeoutError, OSError, RayError) as error:
            link.close()
            self._give_up(error)
            return None
        except BaseException:
            link.close()
            raise
        self._link = link
        return link

    def _give_up(self, error: Exception) -> None:
        self.close()
        self._link = None
        self._silent_until_s = time.monotonic() + _RETRY_S
        reason = str(error).partition("\n")[0] or type(error).__name__
        logger.warning("the pool is called through Ray for %g s: %s", _RETRY_S, reason)


class PoolCallServer:
    """The pool's side."""

    def __init__(self, call: Callable[[LeaseId, bytes, int], Awaitable[bytes]], *, name: str) -> None:
        self._call = call
        self.links = LoopLinkServer(lambda: LoopLink(answer=self._answer), name=f"calls of pool {name}")

    async def _answer(self, topic: int, data: bytes) -> bytes:
        call = msgspec.msgpack.decode(data, type=PoolCall)
        return await self._call(call.lease_id, call.data, call.event_no)
