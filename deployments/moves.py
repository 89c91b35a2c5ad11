"""Running requests moved between replicas of their model, while their clients read on.

    precopy ─► (other pool only) the target copies what the source's pool has sealed, and goes on; again until less
               than a block is new
    freeze  ─► the source stops at a step boundary, the target begins behind the last token that the client has
    commit  ─► the first delta of the new attempt is here; nothing of the old one is forwarded any more

Replicas of one pool share the sealed blocks, so that only the unsealed tail is computed again: the pause is the call,
the admission and one step. Between pools the blocks are copied (cache_actors/block_loader.py): all but the last ones
during the precopy, those sealed since when the target begins. What cannot be copied is computed. What the target may
still refuse goes on at the source or elsewhere: the router's token log is the truth, attempts are numbered, and tokens
and random draws are a function of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from remora.cache_actors.port import KVSource
from remora.deployments.engine.messages import SamplingParams
from remora.deployments.generation_job import GenerationJob
from remora.deployments.request_stream import RequestStream
from remora.deployments.router_stats import MoveReason
from remora.deployments.token_counts import TokenCounts, TokenRange
from remora.namespaces.edits import ContextOutcome, ContextPlan
from remora.namespaces.session_log import EPOCHS_PER_TURN
from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import Conflict, InvalidRequest, RemoraError, Unavailable
from remora.platform.base.ids import ModelId, NamespaceId, PoolId, ReplicaId, RequestId
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
        if source is None or stream.is_landing:
            raise Conflict("The request waits for a replica or is being moved already; try again.", field="to")
        if source == target:
            raise Conflict(f"The request runs at {target!r} already.", field="to")
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
        started_s = asyncio.get_running_loop().time()
        ahead = TokenCounts()
        if transfer == "copied":
            with span(names.MIGRATE_PRECOPY, attributes, parent=request.trace_context):
                ahead = await self._precopy_rounds(stream, source, target)
        with span(names.MIGRATE_FREEZE, attributes, parent=request.trace_context):
            num_tokens = len(request.prompt_token_ids) + stream.log.num_tokens
            num_copied_before, num_converted_before = stream.num_copied_tokens, stream.num_converted_tokens
            landing = core.move(stream, target)
            try:
                async with asyncio.timeout(LANDING_TIMEOUT_S):
                    pause_s = await asyncio.shield(landing)
            except asyncio.CancelledError:
                if not landing.cancelled():
                    raise
                raise Conflict("The request ended while it was moved.", field="to") from None
            except TimeoutError:
                raise Unavailable("the moved request does not go on yet; it waits like any other") from None
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
            counts = (await self.precopy(job)).tokens
            if not number:
                num_shared = counts.shared
            num_copied += counts.copied
            num_converted += counts.converted
            num_ahead = len(token_ids)
        return TokenCounts.of(num_ahead, shared=num_shared, copied=num_copied, converted=num_converted)

    async def precopy(self, job: GenerationJob) -> Brought:
        """Lets the pool of the job's replica have the blocks of the prompt.

        Raises Unavailable when that replica does not manage it; nothing has changed then.
        """
        copy = await self._core.open(job)
        try:
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
        """Gives up what is being drained."""
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
