"""The feeds of one replica: what the engine thread produces, gathered per router, one message a step at most.

    engine thread ── emit(router, deltas) ──► hub ── messages(router) ──► router
                                               └── on_abandoned(requests): nobody waits for them any more

A router that was killed does not close its feeds, and what carries them may go on reading for a while: routers say
every second that they are there, and a feed whose router has said nothing for long ends.

A feed is an era. Opening one ends the router's earlier feed and cancels what was sent under it, because the router has
already given those requests to another replica, or sends them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from remora.deployments.engine.messages import FeedMessage, GenerationRequest, LoadReport, TokenDelta
from remora.deployments.held_deltas import HeldDeltas
from remora.platform.base.errors import IntegrityError, Unavailable
from remora.platform.base.ids import ReplicaId, RequestId, RouterId

logger = logging.getLogger(__name__)

#: A silent feed sends an empty message this often, so that the other side can tell idle from dead.
HEARTBEAT_S = 1.0
#: A router that says nothing for so long is gone; a live one calls `hear` every second.
MAX_ROUTER_SILENCE_S = 5.0


class _Feed:
    __slots__ = ("closed", "deltas", "heard_s", "message_no", "timer", "wake")

    def __init__(self, now_s: float) -> None:
        self.deltas = HeldDeltas(now_s)
        self.heard_s = now_s
        self.message_no = 0
        self.wake = asyncio.Event()
        self.closed = False
        #: Releases what is held, if something is.
        self.timer: asyncio.TimerHandle | None = None


class FeedHub:
    """Owned by the replica's event loop; only `emit` may be called from another thread."""

    def __init__(
        self,
        replica_id: ReplicaId,
        *,
        on_abandoned: Callable[[Sequence[RequestId]], None],
        load: Callable[[], LoadReport],
        card_no: Callable[[], int] = lambda: 0,
        heartbeat_s: float = HEARTBEAT_S,
        max_router_silence_s: float = MAX_ROUTER_SILENCE_S,
    ) -> None:
        self._replica_id = replica_id
        self._on_abandoned = on_abandoned
        self._load = load
        self._card_no = card_no
        self._heartbeat_s = heartbeat_s
        self._max_router_silence_s = max_router_silence_s
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._feeds: dict[RouterId, _Feed] = {}

    def emit(self, router_id: RouterId, deltas: Sequence[TokenDelta]) -> None:
        """Hands a step's deltas over, from any thread. Deltas for a router without a feed are dropped: nobody waits."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, router_id, deltas)
        except RuntimeError:
            return  # the loop has closed: the process is ending

    def _deliver(self, router_id: RouterId, deltas: Sequence[TokenDelta]) -> None:
        feed = self._feeds.get(router_id)
        if feed is None:
            return
        for delta in deltas:
            feed.deltas.add(delta)
        self._release(feed)

    def _release(self, feed: _Feed) -> None:
        """Sends what is due, and plans the rest."""
        feed.deltas.release(self._loop.time())
        if feed.timer is not None:
            feed.timer.cancel()
            feed.timer = None
        if feed.deltas and not feed.closed:
            feed.timer = self._loop.call_at(feed.deltas.due_s, self._release, feed)
        if feed.deltas.ready:
            feed.wake.set()

    def take(self, request: GenerationRequest) -> None:
        """Notes a request under its router's feed. Raises Unavailable without one: nobody would hear its answer."""
        feed = self._feeds.get(request.router_id)
        if feed is None:
            raise Unavailable(f"router {request.router_id} has no open feed at replica {self._replica_id}")
        feed.heard_s = self._loop.time()
        feed.deltas.take(request)

    def hear(self, router_id: RouterId) -> None:
        """Notes that the router is alive."""
        feed = self._feeds.get(router_id)
        if feed is not None:
            feed.heard_s = self._loop.time()

    def _sweep(self) -> None:
        """Ends the feeds of routers that say nothing any more. Runs for as long as there are feeds."""
        limit_s = self._loop.time() - self._max_router_silence_s
        for router_id in [router_id for router_id, feed in self._feeds.items() if feed.heard_s < limit_s]:
            logger.warning("router %s has said nothing for %g s", router_id, self._max_router_silence_s)
            self.close(router_id)
        self._sweep_timer = None
        if self._feeds:
            self._plan_sweep()

    def _plan_sweep(self) -> None:
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(self._max_router_silence_s / 5, self._sweep)

    def drop(self, request_id: RequestId) -> None:
        """Forgets a request that was cancelled."""
        for feed in self._feeds.values():
            feed.deltas.drop(request_id)

    def num_open(self) -> int:
        return len(self._feeds)

    def wake_all(self) -> None:
        """Lets every router have a message now."""
        for feed in self._feeds.values():
            feed.wake.set()

    async def messages(self, router_id: RouterId) -> AsyncGenerator[FeedMessage, None]:
        """The router's feed until it is closed or superseded; closing the iterator closes the feed."""
        self.close(router_id)
        feed = self._feeds[router_id] = _Feed(self._loop.time())
        self._plan_sweep()
        try:
            while not feed.closed:
                feed.wake.clear()
                yield FeedMessage(
                    replica_id=self._replica_id,
                    message_no=feed.message_no,
                    deltas=feed.deltas.take_ready(),
                    load=self._load(),
                    card_no=self._card_no(),
                )
                feed.message_no += 1
                if not feed.deltas.ready:
                    timer = self._loop.call_later(self._heartbeat_s, feed.wake.set)
                    try:
                        await feed.wake.wait()
                    finally:
                        timer.cancel()
        finally:
            if self._feeds.get(router_id) is feed:
                self.close(router_id)

    def close(self, router_id: RouterId) -> None:
        """Ends the router's feed, if it has one, and cancels its requests."""
        feed = self._feeds.pop(router_id, None)
        if feed is not None:
            feed.closed = True
            feed.wake.set()
            if feed.timer is not None:
                feed.timer.cancel()
            logger.info("feed of router %s ended with %d requests open", router_id, len(feed.deltas.open))
            self._on_abandoned(tuple(feed.deltas.open))

    def close_all(self) -> None:
        """Ends every feed: the replica is going away."""
        for router_id in list(self._feeds):
            self.close(router_id)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a registered feed is closed, or pending deltas wait without a wake-up."""
        for router_id, feed in self._feeds.items():
            if feed.closed:
                raise IntegrityError(f"feed of router {router_id} is closed but still registered")
            if any(request.num_choices < 1 for request in feed.deltas.open.values()):
                raise IntegrityError(f"feed of router {router_id} holds a request that has ended")
            if feed.deltas and feed.timer is None:
                raise IntegrityError(f"feed of router {router_id} holds deltas back, and nothing will release them")
            if feed.deltas.ready and not feed.wake.is_set():
                raise IntegrityError(f"feed of router {router_id} has deltas that nothing will send")
