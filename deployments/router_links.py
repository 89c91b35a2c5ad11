"""Links of routers to one replica: what a request and its tokens pass, past Serve.

    router                                   replica
    connect, JOIN ──────────────────────────► RouterLinks: the router's link from now on
    `carry_feed`, a Serve call that lasts ──► FeedHub.messages ──► FEED messages over the link
    submit, cancel, ... over the link ──────► RouterCalls

The call stays open beside the link for as long as the feed does: by it Serve knows that the replica has work, and each
side that the other is gone. The feed ends with the link or with the call, whichever is first, and with it everything
that was sent over the link; the router then does what it does after every loss of a feed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, Protocol

import msgspec

from remora.cache_actors.byte_link import LinkAddress
from remora.cache_actors.loop_link import LoopLink, LoopLinkServer
from remora.deployments.feed import FeedHub
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import ReplicaId, RouterId

#: Topics: what these methods of RouterCalls are asked, with their arguments; and two more.
LINKED_CALLS: Final = ("submit", "freeze", "resume", "cancel", "keep_alive")
JOIN: Final = len(LINKED_CALLS)
FEED: Final = JOIN + 1

_encode = msgspec.msgpack.Encoder().encode


class Calls(Protocol):
    """RouterCalls; each of LINKED_CALLS is a method."""

    def __getattribute__(self, name: str) -> Callable[..., Awaitable[bytes]]: ...


class _Peer:
    """A router's link."""

    def __init__(self, links: RouterLinks) -> None:
        self._links = links
        self.router_id: RouterId | None = None
        self.link = LoopLink(answer=self._answer, on_end=self._end)

    async def _answer(self, topic: int, data: bytes) -> bytes:
        if topic == JOIN:
            self.router_id = RouterId(data.decode())
            self._links.peers[self.router_id] = self
            return b""
        return await self._links.call(self, topic, data)

    def _end(self) -> None:
        if self.router_id is not None and self._links.peers.get(self.router_id) is self:
            del self._links.peers[self.router_id]


class RouterLinks:
    """On the replica's event loop."""

    def __init__(self, replica_id: ReplicaId, hub: FeedHub, calls: Calls) -> None:
        self._replica_id = replica_id
        self._hub = hub
        self._calls = calls
        self._server = LoopLinkServer(lambda: _Peer(self).link, name=f"tokens of replica {replica_id}")
        #: The newest link of each router.
        self.peers: dict[RouterId, _Peer] = {}

    def open(self) -> LinkAddress | None:
        """Where routers connect; None where there are no links."""
        return self._server.open()

    def close(self) -> None:
        self._server.close()

    async def call(self, peer: _Peer, topic: int, data: bytes) -> bytes:
        """One of RouterCalls. Raises Unavailable for a link that is not the router's any more, because the feed that is
        open now is of another era."""
        if topic >= len(LINKED_CALLS) or peer.router_id is None or self.peers.get(peer.router_id) is not peer:
            raise Unavailable(f"the link to replica {self._replica_id} is not in use")
        method: Callable[..., Awaitable[bytes]] = getattr(self._calls, LINKED_CALLS[topic])
        return await method(*msgspec.msgpack.decode(data))

    async def carry(self, router_id: RouterId) -> AsyncGenerator[bytes, None]:
        """The router's feed, over its link. Yields once, when it has begun. Raises Unavailable without a link."""
        peer = self.peers.get(router_id)
        if peer is None:
            raise Unavailable(f"router {router_id} has no link to replica {self._replica_id}")
        try:
            async with aclosing(self._hub.messages(router_id)) as messages:
                yield b""
                async for message in messages:
                    peer.link.tell(FEED, _encode(message))
                    await peer.link.drain()
        finally:
            peer.link.close()
