"""One router's side of one replica: its feed, kept open, and an outbox that batches what is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from remora.deployments.engine.messages import FeedMessage, FreezeOrder, GenerationRequest, LoadReport, Resumption
from remora.deployments.model_card import ModelCard
from remora.deployments.placement import Candidate
from remora.deployments.replica_link import ReplicaLink
from remora.platform.base.errors import RemoraError, ReplicaLeaving, Unavailable
from remora.platform.base.ids import ReplicaId, RequestId, RouterId

logger = logging.getLogger(__name__)

#: A feed that says nothing for so long is dead; a live one says something every second.
MAX_SILENCE_S = 10.0
#: Longest that a call to a replica may take before the replica counts as lost.
CALL_TIMEOUT_S = 10.0
#: How often the replica is told that this router is there; it gives up after five times as long.
KEEP_ALIVE_S = 1.0
#: Traces that a replica is asked for at once; of more it keeps nothing.
MAX_WANTED_TRACES = 512
_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 1.0


class ConnectionOwner(Protocol):
    """What a connection tells the router. Called on the router's loop."""

    def on_connected(self, connection: ReplicaConnection) -> None:
        """It has a card; said again when the card has changed."""
        ...

    def on_message(self, connection: ReplicaConnection, message: FeedMessage) -> None: ...

    def on_leaving(self, connection: ReplicaConnection, unsent: Sequence[RequestId]) -> None:
        """The replica is stopping: nothing reaches it any more, but its feed is open still. What was to be sent about
        `unsent` has not come there."""
        ...

    def on_lost(self, connection: ReplicaConnection, reason: str) -> None:
        """Everything that was sent over the connection must be taken as lost."""
        ...


class ReplicaConnection:
    """Keeps a feed to one replica for as long as the directory lists it, reconnecting after every loss.

    Each connection is an era of its own: after a loss nothing sent before it is waited for any more.
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        link: ReplicaLink,
        router_id: RouterId,
        owner: ConnectionOwner,
        *,
        max_silence_s: float = MAX_SILENCE_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.replica_id = replica_id
        self.link = link
        #: Set with the first message of a feed; cleared when it is lost.
        self.card: ModelCard | None = None
        self.connected = False
        #: Whether the replica is stopping: it takes nothing new, and its feed is read while something is left there.
        self.leaving = False
        #: As the replica last said.
        self.reported = LoadReport()
        #: Tokens of this router's own unfinished requests there; kept by the owner.
        self.own_load_tokens = 0
        self._router_id = router_id
        self._owner = owner
        self._max_silence_s = max_silence_s
        self._call_timeout_s = call_timeout_s
        self._keep_alive_s = keep_alive_s
        self._requests: list[GenerationRequest] = []
        self._freezes: list[FreezeOrder] = []
        self._resumptions: list[Resumption] = []
        self._cancels: list[RequestId] = []
        self._wanted_traces: list[str] = []
        self._outbox_ready = asyncio.Event()
        self._last_message_s = 0.0

    def candidate(self) -> Candidate:
        """The replica as `place` sees it, while it is connected."""
        assert self.card is not None
        return Candidate(
            replica_id=self.replica_id,
            pool_id=self.card.pool_id,
            # The replica's word includes other routers' requests, ours includes what it has not heard of yet.
            load_tokens=max(self.own_load_tokens, self.reported.load_tokens),
            lacks_memory=self.reported.parked_tokens > 0,
        )

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, request: GenerationRequest) -> None:
        """Queues a request; what is queued while a call is under way goes out together with the next."""
        self._requests.append(request)
        self._outbox_ready.set()

    def freeze(self, order: FreezeOrder) -> None:
        """Queues the order to stop a request."""
        self._freezes.append(order)
        self._outbox_ready.set()

    def resume(self, resumption: Resumption) -> None:
        """Queues what a standby waits for."""
        self._resumptions.append(resumption)
        self._outbox_ready.set()

    def cancel(self, request_id: RequestId) -> None:
        """Takes a request back: out of the outbox, or at the replica."""
        queued = len(self._requests)
        self._requests = [request for request in self._requests if request.request_id != request_id]
        if len(self._requests) == queued and self.connected:
            self._cancels.append(request_id)
            self._outbox_ready.set()

    def keep_trace(self, trace_id: str) -> None:
        """Has the replica write what it did for an unsampled request; it is told with the next sign of life."""
        if self.connected and len(self._wanted_traces) < MAX_WANTED_TRACES:
            self._wanted_traces.append(trace_id)

    async def _send_outbox(self) -> None:
        while True:
            await self._outbox_ready.wait()
            self._outbox_ready.clear()
            cancels, self._cancels = self._cancels, []
            resumptions, self._resumptions = self._resumptions, []
            freezes, self._freezes = self._freezes, []
            requests, self._requests = self._requests, []
            batch: tuple[Resumption | FreezeOrder | GenerationRequest, ...] = (*resumptions, *freezes, *requests)
            unsent = [each.request_id for each in batch]
            async with asyncio.timeout(self._call_timeout_s):
                try:
                    # Clients wait for what is handed over.
                    if resumptions:
                        await self.link.resume(resumptions)
                    if freezes:
                        await self.link.freeze(freezes)
                    if cancels:
                        await self.link.cancel(cancels)
                    if requests:
                        await self.link.submit(requests)
                except ReplicaLeaving as error:
                    self._leave(error, unsent)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            async with asyncio.timeout(self._call_timeout_s):
                wanted, self._wanted_traces = self._wanted_traces, []
                try:
                    await self.link.keep_alive(self._router_id, wanted)
                    self._stay()
                except ReplicaLeaving as error:
                    self._leave(error, [])

    def _stay(self) -> None:
        """Serve's list can lack a replica for a moment, while its controller restarts."""
        was_leaving, self.leaving = self.leaving, False
        if was_leaving and self.connected:
            self._owner.on_connected(self)

    def _leave(self, error: ReplicaLeaving, unsent: Sequence[RequestId]) -> None:
        if not self.leaving:
            logger.info("replica %s is leaving: %s", self.replica_id, error)
        self.leaving = True
        self._owner.on_leaving(self, unsent)

    # ---- receiving ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connects and reconnects until cancelled."""
        retry_s = _FIRST_RETRY_S
        while True:
            reason = "the feed ended"
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    card = await self.link.describe()
                await self._serve_feed(card)
            except RemoraError as error:
                reason = str(error)
            except TimeoutError:
                reason = "the replica does not answer"
            except Exception as error:
                # A bug on either side must not end the connection for good.
                logger.exception("replica %s: unexpected error", self.replica_id)
                reason = f"{type(error).__name__}: {error}"
            finally:
                was_connected = self._disconnect()
                if was_connected:
                    self._owner.on_lost(self, reason)
            retry_s = _FIRST_RETRY_S if was_connected else min(2 * retry_s, _MAX_RETRY_S)
            if was_connected:
                logger.warning("replica %s: %s; reconnecting", self.replica_id, reason)
            await asyncio.sleep(retry_s)

    def _disconnect(self) -> bool:
        was_connected, self.connected, self.card = self.connected, False, None
        self.leaving = False
        self._requests, self._freezes, self._resumptions = [], [], []
        self._cancels, self._wanted_traces = [], []
        self._outbox_ready.clear()
        return was_connected

    async def _serve_feed(self, card: ModelCard) -> None:
        loop = asyncio.get_running_loop()
        feed = self.link.feed(self._router_id)
        reader = asyncio.create_task(self._read(feed, card))
        sender = asyncio.create_task(self._send_outbox())
        keeper = asyncio.create_task(self._keep_alive())
        tasks = (reader, sender, keeper)
        self._last_message_s = loop.time()
        try:
            done: set[asyncio.Task[None]] = set()
            while not done:
                # One timer a second, instead of one a message, is enough to notice silence.
                done, _ = await asyncio.wait(
                    tasks, timeout=min(1.0, self._max_silence_s / 4), return_when=asyncio.FIRST_COMPLETED
                )
                if self.leaving and not self.own_load_tokens:
                    # So that the replica need not wait for its time to run out.
                    raise Unavailable("it is leaving, and nothing is left there")
                if not done and loop.time() - self._last_message_s > self._max_silence_s:
                    raise Unavailable(f"the feed was silent for {self._max_silence_s:g} s")
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            # Retrieve all outcomes; the one that mattered has been raised above.
            await asyncio.gather(*tasks, return_exceptions=True)
            close = getattr(feed, "aclose", None)
            if close is not None:
                with suppress(Exception):
                    await close()

    async def _read(self, feed: AsyncIterator[FeedMessage], card: ModelCard) -> None:
        next_no = 0
        loop = asyncio.get_running_loop()
        async for message in feed:
            self._last_message_s = loop.time()
            if message.message_no != next_no:
                raise Unavailable(f"feed message {message.message_no} came instead of {next_no}")
            next_no += 1
            self.reported = message.load
            if next_no == 1:
                self.card = card
                self.connected = True
                self._owner.on_connected(self)
            if message.deltas:
                self._owner.on_message(self, message)
            if self.card is not None and message.card_no != self.card.card_no:
                async with asyncio.timeout(self._call_timeout_s):
                    self.card = await self.link.describe()
                self._owner.on_connected(self)


#: Makes the link to a replica that the directory lists.
Connect = Callable[[ReplicaId], ReplicaLink]
