"""A ReplicaLink whose requests and tokens go over a link (router_links.py), and everything else through Serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec
from ray.exceptions import RayError

from remora.cache_actors.byte_link import LinkAddress
from remora.cache_actors.loop_link import MAX_MESSAGE_BYTES, LoopLink, connect_link
from remora.deployments.engine.messages import FeedMessage
from remora.deployments.router_links import FEED, JOIN, LINKED_CALLS
from remora.deployments.serve_link import ServeLink, decode_feed
from remora.deployments.serve_listing import check_listed
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import ReplicaId, RouterId

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S: Final = 2.0
#: For so long feeds go through Serve after a link that could not be had, or broke.
_RETRY_S: Final = 30.0


class LinkedReplica(ServeLink):
    """Opens a link with each feed. Without one it is a ServeLink: where Ray encrypts, or no connection can be made."""

    def __init__(self, handle: Any, replica_id: ReplicaId) -> None:
        super().__init__(handle, replica_id)
        self._replica_id = replica_id
        self._link: LoopLink | None = None
        self._silent_until_s = 0.0

    async def _call(self, method: str, *arguments: bytes | str | bool) -> bytes:
        link = self._link
        if link is not None and method in LINKED_CALLS:
            data = msgspec.msgpack.encode(arguments)
            if len(data) <= MAX_MESSAGE_BYTES:
                # Serve is not asked, so its word counts that the replica is stopping.
                check_listed(self._replica_id)
                return await link.ask(LINKED_CALLS.index(method), data)
        return await super()._call(method, *arguments)

    async def feed(self, router_id: RouterId) -> AsyncGenerator[FeedMessage, None]:
        heard: asyncio.Queue[bytes | BaseException] = asyncio.Queue()
        link = await self._join(router_id, heard)
        if link is None:
            async with aclosing(super().feed(router_id)) as messages:
                async for message in messages:
                    yield message
            return
        self._link = link
        call = asyncio.create_task(self._hold(router_id, heard))
        try:
            while True:
                item = await heard.get()
                if isinstance(item, BaseException):
                    raise item
                yield decode_feed(item)
        finally:
            self._link = None
            link.close()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _join(self, router_id: RouterId, heard: asyncio.Queue[bytes | BaseException]) -> LoopLink | None:
        """A link over which FEED messages will be put into `heard`, and its end."""

        def end() -> None:
            if self._link is link:  # not by us
                self._silent_until_s = time.monotonic() + _RETRY_S
            heard.put_nowait(Unavailable("the link is broken"))

        if time.monotonic() < self._silent_until_s:
            return None
        link = LoopLink(hear=lambda topic, data: heard.put_nowait(data) if topic == FEED else None, on_end=end)
        try:
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                address = msgspec.msgpack.decode(await super()._call("open_links"), type=LinkAddress | None)
                if address is None:
                    raise Unavailable("it has no links")
                await connect_link(address, link)
                await link.ask(JOIN, router_id.encode())
        except (Unavailable, TimeoutError, OSError, RayError) as error:
            link.close()
            self._silent_until_s = time.monotonic() + _RETRY_S
            reason = str(error).partition("\n")[0] or type(error).__name__
            logger.warning("tokens of replica %s come through Serve: %s", self._replica_id, reason)
            return None
        except BaseException:
            link.close()
            raise
        return link

    async def _hold(self, router_id: RouterId, heard: asyncio.Queue[bytes | BaseException]) -> None:
        """Has the replica carry the feed, and says when it does not any more."""
        try:
            async for _ in self._stream("carry_feed", router_id):
                pass
            heard.put_nowait(Unavailable("the feed has ended"))
        except Exception as error:
            heard.put_nowait(error)
