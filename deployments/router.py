"""The router: chooses replicas, follows their feeds, and keeps every client's stream going when one is lost.

    client ◄── RequestStream ◄── RouterCore ◄── feed (one a replica) ◄── replica
               one token log      choice, failover

States of a request: waiting (no replica yet) → sent (current attempt at one replica) → finished, failed or closed.
A lost replica puts its requests back to waiting with the next attempt number and the tokens the client has. Deadlines
are the engine's; the router keeps that of a request only while it waits for a replica.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence

from opentelemetry.trace import Span

from remora.deployments.catalog import Catalog
from remora.deployments.engine.messages import FeedMessage
from remora.deployments.fleet import Fleet
from remora.deployments.generation_job import GenerationJob
from remora.deployments.listed import Listed
from remora.deployments.moves import Moves
from remora.deployments.placer import Placer
from remora.deployments.replica_connection import Connect, ReplicaConnection
from remora.deployments.request_stream import RequestStream, error_of
from remora.deployments.router_stats import ResumeReason, RouterStats
from remora.deployments.standbys import Standby, Standbys
from remora.deployments.waker import Wake, Waker
from remora.platform.base import telemetry_names as names
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import Conflict, IntegrityError, OverQuota, RemoraError, Unavailable
from remora.platform.base.ids import ReplicaId, RequestId, RouterId, SessionId
from remora.platform.base.telemetry import span, start_span

logger = logging.getLogger(__name__)

#: A request whose replicas keep dying is not given a fourth one: it may be what kills them.
MAX_LOST_ATTEMPTS = 3
#: Requests of one model that may be unfinished at once; more are answered 429, and other models' are taken.
MAX_OPEN_REQUESTS = 4096


class RouterCore:
    """Owned by one event loop. Told of replicas by `update_replicas`; `stop` ends it."""

    def __init__(
        self,
        config: RemoraConfig,
        connect: Connect,
        *,
        router_id: RouterId,
        stats: RouterStats | None = None,
        wake: Wake | None = None,
    ) -> None:
        """`wake`: starts the replicas of a model whose `idle_timeout_s` has stopped them."""
        self.config = config
        self.router_id = router_id
        self.stats = stats or RouterStats()
        self.catalog = Catalog(config)
        self.waker = Waker(
            self.catalog.models,
            wake,
            is_ready=lambda model_id: self.fleet.is_ready(model_id),
            stats=self.stats,
            queue_timeout_s=config.http.queue_timeout_s,
        )
        self.fleet = Fleet(self.catalog, connect, self, router_id=router_id, waker=self.waker)
        self.standbys = Standbys(self)
        self.moves = Moves(self)
        #: By the id of their current attempt.
        self._streams: dict[RequestId, RequestStream] = {}
        #: Streams without a replica, oldest first.
        self._waiting: dict[RequestId, RequestStream] = {}
        self._timers: dict[RequestId, asyncio.TimerHandle] = {}
        #: Of waiting streams whose model has to be woken.
        self._wakes: dict[RequestId, Span] = {}
        namespaces = self.catalog.namespaces
        self.placer = Placer(name for name, namespace in namespaces.items() if namespace.kv_replicas > 1)
        self._random = random.SystemRandom()

    # ---- life --------------------------------------------------------------------------------------------------------

    def update_replicas(self, listed: Mapping[ReplicaId, Listed]) -> None:
        """Takes over the directory: connects to replicas that are new in it, leaves those that are gone."""
        self.fleet.update(listed)
        self.placer.forget_gone(listed, asyncio.get_running_loop().time())
        self._assign_waiting()
        self.moves.drain()

    async def stop(self) -> None:
        """Ends all feeds and fails all unfinished requests."""
        await self.moves.stop()
        await self.waker.stop()
        for stream in list(self._streams.values()):
            self._fail(stream, Unavailable("the router is shutting down"))
        await self.fleet.stop()

    # ---- questions ---------------------------------------------------------------------------------------------------

    def streams_at(self, replica_id: ReplicaId) -> list[RequestStream]:
        """Unfinished requests whose current attempt is there."""
        return [stream for stream in self._streams.values() if stream.replica_id == replica_id]

    def stream_of(self, session_id: SessionId) -> RequestStream | None:
        """The session's unfinished request, if this router has it."""
        found = (stream for stream in self._streams.values() if stream.request.session_id == session_id)
        return next(found, None)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def open(self, job: GenerationJob) -> RequestStream:
        """Starts a request and returns its stream, which the caller must close.

        Raises OverQuota when the model has too many unfinished requests here, Unavailable while it has had no replica.
        """
        num_open = len(self._streams)
        if num_open >= MAX_OPEN_REQUESTS:
            num_open = sum(stream.request.model_id == job.model_id for stream in self._streams.values())
        if num_open >= MAX_OPEN_REQUESTS:
            message = f"{MAX_OPEN_REQUESTS} requests of {job.model_id} are already under way; try again in a second."
            raise OverQuota(message, retry_after_s=1.0)
        card = await self.fleet.card(job.model_id)
        # Drawn here and not by a replica, so that a resumed request continues the same random stream.
        seed = self._random.getrandbits(63) if job.sampling.seed is None else job.sampling.seed
        root = self.catalog.chain_root(job.namespace_id, card.of(job.namespace_id).fingerprint)
        request = job.request(
            router_id=self.router_id,
            card=card,
            root=root,
            seed=seed,
            queue_timeout_s=self.config.http.queue_timeout_s,
        )
        loop = asyncio.get_running_loop()
        stream = RequestStream(request, started_s=loop.time(), on_close=self._on_close)
        stream.owner, stream.target, stream.given_source = job.owner, job.target, job.kv_source
        if job.context is None:
            stream.chain_start = (root, card.block_tokens)
        self._streams[stream.attempt_id] = stream
        self._await_replica(stream)
        return stream

    def _assign_waiting(self) -> None:
        for stream in list(self._waiting.values()):
            self._assign(stream)

    def _await_replica(self, stream: RequestStream) -> None:
        """Starts an attempt: at once if a replica is connected, else when one is, within the model's longest
        wait."""
        model_id = stream.request.model_id
        self._waiting[stream.request_id] = stream
        self._timers[stream.request_id] = asyncio.get_running_loop().call_later(
            self.waker.max_wait_s(model_id), self._on_queue_timeout, stream
        )
        self._assign(stream)
        if stream.replica_id is None and self.waker.can_sleep(model_id):
            self._wakes[stream.request_id] = start_span(
                names.MODEL_WAKE, stream.attempt_attributes(), parent=stream.request.trace_context
            )
            self.waker.need(model_id)

    def _assign(self, stream: RequestStream) -> None:
        """Gives a waiting request to a replica, if there is one."""
        request = stream.request
        candidates = self.fleet.candidates(request.model_id)
        if not candidates:
            return
        with span(names.ROUTER_ROUTE, stream.attempt_attributes(), parent=request.trace_context) as route:
            choice, num_blocks = self.placer.choose(stream, candidates)
            route.set_attribute(names.REMORA_REPLICA_ID, choice.replica_id)
            route.set_attribute(names.REMORA_ROUTE_REASON, choice.reason)
            route.set_attribute(names.REMORA_ROUTE_OVERLAP_BLOCKS, num_blocks)
        was_asleep = self._stop_waiting(stream)
        connection = self.fleet.connection(choice.replica_id)
        assert connection is not None, "a candidate is connected"
        connection.own_load_tokens += stream.load_tokens
        stream.replica_id = choice.replica_id
        waited_s = asyncio.get_running_loop().time() - stream.started_s
        # Waiting for the model to wake is not queueing: after it the queue is as new as the replica.
        is_new = stream.log.empty and not was_asleep
        left_s = max(request.queue_timeout_s - waited_s, 0.1) if is_new else request.queue_timeout_s
        connection.send(stream.attempt_request(left_s))
        self.stats.routed(request.model_id, choice.reason)

    # ---- connections say ---------------------------------------------------------------------------------------------

    def on_connected(self, connection: ReplicaConnection) -> None:
        assert connection.card is not None
        self.fleet.note_card(connection.card)
        self.placer.sources.note(connection.card)
        self.waker.arrived(connection.card.model_id)
        logger.info("replica %s of %s is connected", connection.replica_id, connection.card.model_id)
        self._assign_waiting()
        self.moves.drain()

    def on_message(self, connection: ReplicaConnection, message: FeedMessage) -> None:
        for delta in message.deltas:
            if self.standbys.hear(delta):
                continue
            stream = self._streams.get(delta.request_id)
            if stream is None or stream.replica_id != connection.replica_id:
                continue  # of an attempt that is over
            if delta.epoch != stream.epoch:
                continue
            if delta.handover is not None and delta.first_token_index == stream.log.num_tokens:
                stream.frozen(delta.handover)
                continue
            if delta.finish_reason == "error":
                self._on_error(stream, error_of(delta))
                continue
            if delta.finish_reason == "abort":
                # Not by us, for then the attempt would be over: the replica is shutting down.
                self._on_error(stream, Unavailable("the replica aborted the request"))
                continue
            verdict = stream.log.judge(delta)
            if verdict == "forward":
                self.placer.learn(connection.card, stream, delta)
                stream.push(delta)
                stream.land()
                if stream.log.finished:
                    self._forget(stream)
            elif verdict == "gap":
                self._resume(stream, "gap", Unavailable("tokens of this request were lost on their way"))

    def on_leaving(self, connection: ReplicaConnection, unsent: Sequence[RequestId]) -> None:
        for attempt_id in unsent:
            stream = self._streams.get(attempt_id)
            if stream is not None and stream.replica_id == connection.replica_id:
                self._withdraw(stream)
                self.stats.resumed(stream.request.model_id, "unavailable")
                self._next_attempt(stream, None)
            elif (standby := self.standbys.find(attempt_id)) is not None:
                self.standbys.refuse(standby, Unavailable(f"the replica {connection.replica_id} is leaving"))
        for stream in self.streams_at(connection.replica_id):
            self.waker.need(stream.request.model_id)
        self.moves.drain()

    def on_lost(self, connection: ReplicaConnection, reason: str) -> None:
        self.standbys.lost(connection.replica_id, reason)
        for stream in [each for each in self._streams.values() if each.replica_id == connection.replica_id]:
            self._resume(stream, "replica_lost", Unavailable(f"the replica was lost under this request: {reason}"))

    def _on_error(self, stream: RequestStream, error: RemoraError) -> None:
        """An engine's error is final, unless its replica goes away or will not have what was moved to it."""
        if isinstance(error, Unavailable):
            self._resume(stream, "unavailable", error)
        elif stream.is_landing:
            self._resume(stream, "refused", error)
        else:
            self._fail(stream, error)

    def _resume(self, stream: RequestStream, reason: ResumeReason, error: RemoraError) -> None:
        """Starts the next attempt, behind what the client has; after too many the stream fails with `error`."""
        logger.warning("request %s: %s; %d tokens are with the client", stream.attempt_id, error, stream.log.num_tokens)
        self._withdraw(stream)
        stream.num_lost += 1
        if stream.is_bound:
            self._fail(stream, Unavailable(f"{error}; the model has failover: off, so that a stream ends with it"))
            return
        if stream.num_lost > MAX_LOST_ATTEMPTS:
            self._fail(stream, error)
            return
        self.stats.resumed(stream.request.model_id, reason)
        # What a target refuses goes back to where it ran, if that is still there.
        self._next_attempt(stream, stream.origin if reason == "refused" else None)

    def move(self, stream: RequestStream, target: ReplicaId) -> asyncio.Future[float]:
        """Ends the current attempt and begins the next at `target`, behind what the client has.

        The future holds the pause in seconds, from now to the first delta of the next attempt, wherever it runs in the
        end; it is cancelled when the request ends before. Raises Conflict for a request that has ended or is moving.
        """
        if self._streams.get(stream.attempt_id) is not stream or stream.is_landing:
            raise Conflict("The request has ended, or is being moved already.", field="to")
        origin = stream.replica_id
        self._withdraw(stream)
        self._stop_waiting(stream)
        landing = stream.take_off(origin)
        self._next_attempt(stream, target)
        return landing

    def switch(self, stream: RequestStream, standby: Standby) -> None:
        """Makes a standby the request's attempt; from here on nothing of the old one counts."""
        assert stream.replica_id is not None, "it runs somewhere"
        source = self.fleet.connection(stream.replica_id)
        if source is not None:
            source.own_load_tokens -= stream.load_tokens
        del self._streams[stream.attempt_id]
        stream.last_replica_id, stream.replica_id = stream.replica_id, standby.connection.replica_id
        stream.attempt = standby.attempt
        self._streams[stream.attempt_id] = stream
        standby.connection.own_load_tokens += stream.load_tokens
        with span(names.ROUTER_ROUTE, stream.attempt_attributes(), parent=stream.request.trace_context) as route:
            route.set_attribute(names.REMORA_REPLICA_ID, stream.replica_id)
            route.set_attribute(names.REMORA_ROUTE_REASON, "moved")
        self.stats.routed(stream.request.model_id, "moved")

    def thaw(self, stream: RequestStream) -> None:
        """The current attempt stands still and nobody takes it over: the next begins where it ran."""
        self._withdraw(stream)
        self._next_attempt(stream, stream.origin)

    def _next_attempt(self, stream: RequestStream, target: ReplicaId | None) -> None:
        if target is None and stream.standby is not None and stream.standby.is_ready:
            target = stream.standby.connection.replica_id
        self.standbys.end(stream)
        self._streams.pop(stream.attempt_id, None)
        stream.attempt = stream.claim_attempt()
        stream.pool_epoch = stream.epoch
        stream.target = target
        self._streams[stream.attempt_id] = stream
        self._await_replica(stream)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _on_queue_timeout(self, stream: RequestStream) -> None:
        self._fail(
            stream,
            Unavailable(
                f"No replica of the model {stream.request.model_id!r} came up within "
                f"{self.waker.max_wait_s(stream.request.model_id):g} s; try again.",
                retry_after_s=5.0,
            ),
        )

    def _stop_waiting(self, stream: RequestStream) -> bool:
        """Whether it waited for its model to wake."""
        self._waiting.pop(stream.request_id, None)
        timer = self._timers.pop(stream.request_id, None)
        if timer is not None:
            timer.cancel()
        wake = self._wakes.pop(stream.request_id, None)
        if wake is not None:
            wake.end()
        return wake is not None

    def _withdraw(self, stream: RequestStream) -> None:
        """Takes the current attempt away from its replica, stopping it there if it still runs."""
        if stream.replica_id is None:
            return
        connection = self.fleet.connection(stream.replica_id)
        stream.last_replica_id, stream.replica_id = stream.replica_id, None
        if connection is not None:
            connection.own_load_tokens -= stream.load_tokens
            if not stream.log.finished:
                connection.cancel(stream.attempt_id)

    def _fail(self, stream: RequestStream, error: RemoraError) -> None:
        self._forget(stream)
        stream.fail(error)

    def _on_close(self, stream: RequestStream) -> None:
        if self._streams.get(stream.attempt_id) is stream:
            self._forget(stream)
            self.stats.abandoned(stream.request.model_id)

    def _forget(self, stream: RequestStream) -> None:
        self._withdraw(stream)
        self._stop_waiting(stream)
        self._streams.pop(stream.attempt_id, None)
        self.standbys.end(stream)
        stream.crash_land()

    def check_integrity(self) -> None:
        """Raises IntegrityError if a request is lost between the states, or a finished one is still held."""
        self.standbys.check_integrity()
        for attempt_id, stream in self._streams.items():
            if stream.attempt_id != attempt_id:
                raise IntegrityError(f"request {stream.request_id} is held under the old attempt {attempt_id}")
            if (stream.replica_id is None) != (stream.request_id in self._waiting):
                raise IntegrityError(f"request {attempt_id} is neither waiting nor with a replica, or both")
            if stream.log.finished or stream.closed:
                raise IntegrityError(f"request {attempt_id} has ended but is still held")
        held = {stream.request_id for stream in self._streams.values()}
        self.waker.check_integrity()
        if not self._waiting.keys() >= self._wakes.keys():
            raise IntegrityError("a request waits for its model to wake, and has been given to a replica")
        if not held.issuperset(self._waiting) or self._waiting.keys() != self._timers.keys():
            raise IntegrityError("a request waits but is not held, or its timer and it are not together")
        for connection in self.fleet.connections():
            replica_id = connection.replica_id
            load = sum(stream.load_tokens for stream in self._streams.values() if stream.replica_id == replica_id)
            if connection.own_load_tokens != load:
                raise IntegrityError(f"replica {replica_id} is charged {connection.own_load_tokens} tokens, not {load}")
