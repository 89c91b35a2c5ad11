"""Running requests moved between replicas of their model, while their clients read on.

    precopy ─► (other pool only) the target copies what the source's pool has sealed, and goes on; again until less
               than a block is new
    standby ─► the target is admitted and computes what is not sealed, up to the last token: it may refuse here, and
               nothing has happened
    freeze  ─► the source stops at a step boundary and names its last blocks
    tail    ─► the target takes the tokens since, copies what it lacks out of those blocks, and goes on
    commit  ─► the standby is the attempt that counts; nothing of the old one is forwarded any more
    release ─► the first token from the target is here: the source lets its blocks go

The pause is two round trips, a block copy and a step. What cannot be copied is computed. A request with several
choices, with a context, of a pipeline, or at a replica that nothing reaches any more, is ended at the source and begins
at the target.
Whatever dies, the request goes on somewhere: the router's token log is the truth, attempts are numbered, and tokens and
random draws are a function of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from remora.cache_actors.port import KVSource
from remora.deployments.engine.messages import SamplingParams
from remora.deployments.generation_job import GenerationJob
from remora.deployments.move_stages import STAGES_FOLDER, MoveStages
from remora.deployments.request_stream import RequestStream
from remora.deployments.router_stats import MoveReason
from remora.deployments.standbys import Standby
from remora.deployments.token_counts import TokenCounts, TokenRange
from remora.namespaces.edits import ContextOutcome, ContextPlan
from remora.namespaces.session_log import EPOCHS_PER_TURN
from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import Conflict, InvalidRequest, RemoraError, Unavailable
from remora.platform.base.ids import ModelId, NamespaceId, PoolId, ReplicaId, RequestId, SessionId
from remora.platform.base.paths import default_state_dir
from remora.platform.base.telemetry import span

if TYPE_CHECKING:
    from remora.deployments.router import RouterCore

logger = logging.getLogger(__name__)

#: Longest that a target may take to compute what a request has so far.
PRECOPY_TIMEOUT_S = 120.0
#: How often what is new is copied ahead while the request goes on.
MAX_PRECOPY_ROUNDS = 4
#: A move whose target says nothing for so long is reported as failed; the request itself goes on as any other.
LANDING_TIMEOUT_S = 60.0
#: Requests that leave a draining replica at once: each costs a prefill of its tail at another.
MAX_PARALLEL_MOVES = 4
#: Epochs of a turn that moves leave to failovers.
SPARE_ATTEMPTS = 16


#: How the tokens of a move are to get to the target: its pool has them, or it copies them.
Transfer = Literal["shared", "copied"]


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What a move did."""

    #: None: a session that had not run yet.
    source: ReplicaId | None
    #: Where the request runs now; not the wanted target if that refused it.
    replica: ReplicaId
    #: Of the prompt and the output so far: how they got there, and the same in order.
    tokens: TokenCounts
    ranges: tuple[TokenRange, ...]
    #: Without a token for the client, beyond what it would have waited anyway.
    pause_s: float
    took_s: float


class Brought(NamedTuple):
    """What a precopy did."""

    #: How the tokens got there.
    tokens: TokenCounts
    #: What became of a context that was or is edited, if anything did.
    context: ContextOutcome | None


def precopy_job(
    request_id: RequestId,
    model_id: ModelId,
    namespace_id: NamespaceId,
    token_ids: tuple[int, ...],
    target: ReplicaId | None = None,
    *,
    priority: int = 0,
    owner: ReplicaId | None = None,
    context: ContextPlan | None = None,
    num_kept_tokens: int | None = None,
    kv_source: KVSource | None = None,
    trace_context: Mapping[str, str] | None = None,
) -> GenerationJob:
    """Brings these tokens' KV to the target, or where a request of `owner`'s session would go, from the pool of `owner`
    as far as that has it; the one token that it also generates is for nobody. `num_kept_tokens`: how many of them are a
    session's; None: all."""
    return GenerationJob(
        request_id=request_id,
        model_id=model_id,
        namespace_id=namespace_id,
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        priority=priority,
        context=context,
        num_kept_tokens=len(token_ids) if num_kept_tokens is None else num_kept_tokens,
        owner=owner,
        target=target,
        kv_source=kv_source,
        trace_context=trace_context,
    )


class Moves:
    """Of one router; lives on its event loop."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._draining: dict[ReplicaId, asyncio.Task[None]] = {}
        cluster = core.config.cluster
        folder = (cluster.state_dir or default_state_dir()) / STAGES_FOLDER if cluster.debug else None
        self._stages = MoveStages(folder)
        self._handovers: set[asyncio.Task[float]] = set()

    async def move(self, stream: RequestStream, target: ReplicaId, reason: MoveReason = "asked") -> Moved:
        """Moves a running request and returns when it runs on.

        Raises InvalidRequest for a target that does not serve the model or takes no requests, Conflict for a request
        that has ended, has no replica yet or is moving already, Unavailable when the target cannot be used.
        """
        core, request = self._core, stream.request
        candidates = {each.replica_id: each for each in core.fleet.candidates(request.model_id)}
        if target not in candidates:
            known = ", ".join(sorted(candidates)) or "none"
            raise InvalidRequest(
                f"to: no replica {target!r} of {request.model_id} takes requests; those that do: {known}.", field="to"
            )
        source = stream.replica_id
        if source is None or stream.is_landing or stream.is_moving:
            raise Conflict("The request waits for a replica or is being moved already; try again.", field="to")
        if source == target:
            raise Conflict(f"The request runs at {target!r} already.", field="to")
        if stream.is_bound:
            raise Conflict(f"{request.model_id} has failover: off: a stream that has begun stays.", field="to")
        if stream.attempt + SPARE_ATTEMPTS >= EPOCHS_PER_TURN:
            raise Conflict(f"The request was moved {stream.attempt} times already; it stays.", field="to")
        transfer: Transfer = "shared" if self.pool_of(source) == candidates[target].pool_id else "copied"
        attributes = {
            names.REMORA_REQUEST_ID: request.request_id,
            names.REMORA_NAMESPACE: request.namespace_id,
            names.REMORA_REPLICA_ID: target,
            names.REMORA_MIGRATE_SOURCE: source,
            names.REMORA_MIGRATE_TRANSFER: transfer,
        }
        stream.is_moving = True
        try:
            return await self._move(stream, source, target, transfer, reason, attributes)
        finally:
            stream.is_moving = False

    async def _move(
        self,
        stream: RequestStream,
        source: ReplicaId,
        target: ReplicaId,
        transfer: Transfer,
        reason: MoveReason,
        attributes: dict[str, str],
    ) -> Moved:
        core, request = self._core, stream.request
        started_s = asyncio.get_running_loop().time()
        ahead = TokenCounts()
        if transfer == "copied":
            with span(names.MIGRATE_PRECOPY, attributes, parent=request.trace_context):
                ahead = await self._precopy_rounds(stream, source, target)
        num_tokens = len(request.prompt_token_ids) + stream.log.num_tokens
        num_copied_before, num_converted_before = stream.num_copied_tokens, stream.num_converted_tokens
        if self._can_hand_over(stream, source):
            # Whoever asked may leave, but not with the request standing still.
            task = asyncio.create_task(self._hand_over(stream, target, attributes))
            self._handovers.add(task)
            task.add_done_callback(self._handovers.discard)
            pause_s = await asyncio.shield(task)
        else:
            with span(names.MIGRATE_FREEZE, attributes, parent=request.trace_context):
                pause_s = await self._landed(core.move(stream, target))
        replica = stream.replica_id or target
        with span(names.MIGRATE_COMMIT, attributes, parent=request.trace_context) as commit:
            commit.set_attribute(names.REMORA_MIGRATE_PAUSE, pause_s)
            if self.pool_of(replica) == self.pool_of(source):
                tokens = TokenCounts.of(num_tokens, shared=num_tokens)
            else:
                num_copied = ahead.copied + stream.num_copied_tokens - num_copied_before
                num_converted = ahead.converted + stream.num_converted_tokens - num_converted_before
                tokens = TokenCounts.of(num_tokens, shared=ahead.shared, copied=num_copied, converted=num_converted)
            commit.set_attributes(tokens.attributes())
        core.stats.moved(request.model_id, reason, pause_s)
        took_s = asyncio.get_running_loop().time() - started_s
        logger.info("request %s moved from %s to %s: pause %.3f s", request.request_id, source, replica, pause_s)
        return Moved(
            source=source,
            replica=replica,
            tokens=tokens,
            ranges=tokens.ranges(),
            pause_s=pause_s,
            took_s=took_s,
        )

    def _can_hand_over(self, stream: RequestStream, source: ReplicaId) -> bool:
        connection, request = self._core.fleet.connection(source), stream.request
        is_reachable = connection is not None and connection.connected and not connection.leaving
        # Of a pipeline several steps are under way, and KV lies in several arenas.
        is_whole = self._core.catalog.models[request.model_id].pipeline_stages == 1
        is_plain = request.num_choices == 1 and request.context is None
        return is_reachable and is_whole and is_plain and not stream.log.empty

    async def _hand_over(self, stream: RequestStream, target: ReplicaId, attributes: Mapping[str, str]) -> float:
        """From the source to a standby at the target, with its tail; returns the pause."""
        core, session_id, parent = self._core, stream.request.session_id, stream.request.trace_context
        standby = core.standbys.send(stream, target)
        try:
            with span(names.MIGRATE_PRECOPY, attributes, parent=parent):
                await self._ready(standby)
            await self._stages.reach("freeze", session_id)
            with span(names.MIGRATE_FREEZE, attributes, parent=parent):
                pause_s = await self._landed(await self._switch(stream, standby))
        finally:
            if stream.standby is standby:
                core.standbys.drop(stream)
        await self._stages.reach("release", session_id)
        core.standbys.release_source(stream)
        return pause_s

    async def _ready(self, standby: Standby) -> None:
        """Raises Unavailable when the target does not take it, Conflict when the request has ended meanwhile."""
        try:
            async with asyncio.timeout(PRECOPY_TIMEOUT_S):
                error = await asyncio.shield(standby.answer)
        except TimeoutError:
            error = Unavailable("it does not answer in time")
        if standby.stream.closed or standby.stream.log.finished:
            raise Conflict("The request ended while it was moved.", field="to")
        if error is not None:
            raise Unavailable(f"{standby.connection.replica_id} cannot take the request: {error}") from error

    async def _switch(self, stream: RequestStream, standby: Standby) -> asyncio.Future[float]:
        """Stops the source and lets the standby go on; the future will hold the pause. Whatever fails, the request does
        not stand still: it goes on where it ran."""
        core, session_id, attempt = self._core, stream.request.session_id, stream.attempt
        freezing, landing = core.standbys.freeze(stream, standby)
        try:
            async with asyncio.timeout(LANDING_TIMEOUT_S):
                handover = await asyncio.shield(freezing)
            if handover is not None:
                await self._stages.reach("tail", session_id)
                if core.standbys.take(stream, standby):
                    await self._stages.reach("commit", session_id)
                    core.standbys.resume(stream, standby, handover)
        except TimeoutError:
            logger.warning("request %s: its replica does not stop it", stream.attempt_id)
        finally:
            if stream.attempt == attempt and stream.is_landing:
                core.thaw(stream)
        return landing

    async def _landed(self, landing: asyncio.Future[float]) -> float:
        """The pause, once the first delta of the new attempt is here."""
        try:
            async with asyncio.timeout(LANDING_TIMEOUT_S):
                return await asyncio.shield(landing)
        except asyncio.CancelledError:
            if not landing.cancelled():
                raise
            raise Conflict("The request ended while it was moved.", field="to") from None
        except TimeoutError:
            raise Unavailable("the moved request does not go on yet; it waits like any other") from None

    async def _precopy_rounds(self, stream: RequestStream, source: ReplicaId, target: ReplicaId) -> TokenCounts:
        """Copies ahead until less than a block is new, or it is not worth another round."""
        request = stream.request
        card = await self._core.fleet.card(request.model_id)
        num_shared = num_copied = num_converted = num_ahead = 0
        for number in range(MAX_PRECOPY_ROUNDS):
            token_ids = request.prompt_token_ids + stream.log.token_ids()[0]
            if request.context is None:
                # Full blocks and the one token that a replica always computes.
                token_ids = token_ids[: (len(token_ids) - 1) // card.block_tokens * card.block_tokens + 1]
            if len(token_ids) - num_ahead < card.block_tokens and (number or request.context is None):
                break
            job = precopy_job(
                RequestId(f"{stream.attempt_id}~precopy{number}"),
                request.model_id,
                request.namespace_id,
                token_ids,
                target,
                priority=request.priority,
                owner=source,
                context=request.context,
                num_kept_tokens=request.num_kept_tokens,
                trace_context=request.trace_context,
            )
            counts = (await self.precopy(job, stream.request.session_id)).tokens
            if not number:
                num_shared = counts.shared
            num_copied += counts.copied
            num_converted += counts.converted
            num_ahead = len(token_ids)
        return TokenCounts.of(num_ahead, shared=num_shared, copied=num_copied, converted=num_converted)

    async def precopy(self, job: GenerationJob, session_id: SessionId | None = None) -> Brought:
        """Lets the pool of the job's replica have the blocks of the prompt. `session_id` is that of the running request
        that it is for, if there is one.

        Raises Unavailable when that replica does not manage it; nothing has changed then.
        """
        copy = await self._core.open(job)
        try:
            await self._stages.reach("precopy", session_id)
            async with asyncio.timeout(PRECOPY_TIMEOUT_S):
                while await copy.next_deltas():
                    pass
        except (RemoraError, TimeoutError) as error:
            raise Unavailable(
                f"{job.target or 'its replica'} cannot take the tokens: {error or 'it does not answer'}"
            ) from error
        finally:
            copy.close()
        num_copied, num_converted = copy.num_copied_tokens, copy.num_converted_tokens
        num_found = max(0, (copy.num_cached_tokens or 0) - num_copied - num_converted)
        total = len(job.prompt_token_ids)
        tokens = TokenCounts.of(total, shared=num_found, copied=num_copied, converted=num_converted)
        return Brought(tokens, copy.context)

    def pool_of(self, replica_id: ReplicaId | None) -> PoolId | None:
        """None for a replica that this router has never been connected to."""
        return self._core.placer.sources.pool_of(replica_id)

    # ---- draining ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Starts to empty every draining replica that has requests and is not being emptied yet."""
        for replica_id in self._core.fleet.draining():
            if replica_id not in self._draining and self._core.streams_at(replica_id):
                task = asyncio.create_task(self._empty(replica_id), name=f"drain-{replica_id}")
                self._draining[replica_id] = task
                task.add_done_callback(partial(self._emptied, replica_id))

    async def _empty(self, replica_id: ReplicaId) -> None:
        """Moves what can be moved now; what finds no other replica stays until it ends, or until one connects."""
        permits = asyncio.Semaphore(MAX_PARALLEL_MOVES)

        async def leave(stream: RequestStream) -> None:
            async with permits:
                candidates = self._core.fleet.candidates(stream.request.model_id)
                if stream.replica_id != replica_id or not candidates:
                    return
                try:
                    target = self._core.placer.place(stream, candidates).replica_id
                    await self.move(stream, target, "drain")
                except RemoraError as error:
                    self._core.stats.move_failed(stream.request.model_id, "drain")
                    logger.info("request %s stays at %s: %s", stream.request_id, replica_id, error)

        async with asyncio.TaskGroup() as group:
            for stream in self._core.streams_at(replica_id):
                group.create_task(leave(stream))

    def _emptied(self, replica_id: ReplicaId, _task: asyncio.Task[None]) -> None:
        self._draining.pop(replica_id, None)

    async def stop(self) -> None:
        """Gives up what is being drained or moved."""
        tasks: list[asyncio.Task[Any]] = [*self._draining.values(), *self._handovers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
