"""Running requests moved between replicas of their model, while their clients read on.

    precopy ─► (other pool only) the target computes and seals what the request has so far; the source goes on
    freeze  ─► the source stops at a step boundary, the target begins behind the last token that the client has
    commit  ─► the first delta of the new attempt is here; nothing of the old one is forwarded any more

Replicas of one pool share the sealed blocks, so that only the unsealed tail is computed again: the pause is the call,
the admission and one step. Between pools the tokens travel and the target computes them during the precopy; copying
blocks instead is not there yet. What the target may still refuse goes on at the source or elsewhere: the router's token
log is the truth, attempts are numbered, and tokens and random draws are a function of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from remora.deployments.engine.messages import SamplingParams
from remora.deployments.generation_job import GenerationJob
from remora.deployments.placement import Candidate, affinity_key, place
from remora.deployments.request_stream import RequestStream
from remora.deployments.router_stats import MoveReason
from remora.namespaces.edits import ContextPlan
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
#: A move whose target says nothing for so long is reported as failed; the request itself goes on as any other.
LANDING_TIMEOUT_S = 60.0
#: Requests that leave a draining replica at once: each costs a prefill of its tail at another.
MAX_PARALLEL_MOVES = 4
#: Epochs of a turn that moves leave to failovers.
SPARE_ATTEMPTS = 16

#: How the tokens before the move got to the target: in the common pool, or computed there.
Transfer = Literal["shared", "recomputed"]


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What a move did."""

    #: None: a session that had not run yet.
    source: ReplicaId | None
    #: Where the request runs now; not the wanted target if that refused it.
    replica: ReplicaId
    transfer: Transfer
    #: Of the prompt and the output so far.
    num_tokens: int
    #: Without a token for the client, beyond what it would have waited anyway.
    pause_s: float
    took_s: float


def precopy_job(
    request_id: RequestId,
    model_id: ModelId,
    namespace_id: NamespaceId,
    token_ids: tuple[int, ...],
    target: ReplicaId,
    *,
    priority: int = 0,
    context: ContextPlan | None = None,
    trace_context: Mapping[str, str] | None = None,
) -> GenerationJob:
    """Computes these tokens at the target; the one token that it also generates is for nobody."""
    return GenerationJob(
        request_id=request_id,
        model_id=model_id,
        namespace_id=namespace_id,
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        priority=priority,
        context=context,
        target=target,
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
        candidates = {each.replica_id: each for each in core.candidates(request.model_id)}
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
        transfer: Transfer = "shared" if self.pool_of(source) == candidates[target].pool_id else "recomputed"
        attributes = {
            names.REMORA_REQUEST_ID: request.request_id,
            names.REMORA_NAMESPACE: request.namespace_id,
            names.REMORA_REPLICA_ID: target,
            names.REMORA_MIGRATE_SOURCE: source,
            names.REMORA_MIGRATE_TRANSFER: transfer,
        }
        started_s = asyncio.get_running_loop().time()
        if transfer == "recomputed":
            with span(names.MIGRATE_PRECOPY, attributes, parent=request.trace_context):
                await self.precopy(
                    precopy_job(
                        RequestId(f"{stream.attempt_id}~precopy"),
                        request.model_id,
                        request.namespace_id,
                        request.prompt_token_ids + stream.log.token_ids()[0],
                        target,
                        priority=request.priority,
                        context=request.context,
                        trace_context=request.trace_context,
                    )
                )
        with span(names.MIGRATE_FREEZE, attributes, parent=request.trace_context):
            num_tokens = len(request.prompt_token_ids) + stream.log.num_tokens
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
        core.stats.moved(request.model_id, reason, pause_s)
        took_s = asyncio.get_running_loop().time() - started_s
        logger.info("request %s moved from %s to %s: pause %.3f s", request.request_id, source, replica, pause_s)
        return Moved(
            source=source, replica=replica, transfer=transfer, num_tokens=num_tokens, pause_s=pause_s, took_s=took_s
        )

    async def precopy(self, job: GenerationJob) -> None:
        """Lets the pool of `job.target` have the blocks of the prompt.

        Raises Unavailable when the target does not manage it; nothing has changed then.
        """
        copy = await self._core.open(job)
        try:
            async with asyncio.timeout(PRECOPY_TIMEOUT_S):
                while await copy.next_deltas():
                    pass
        except (RemoraError, TimeoutError) as error:
            raise Unavailable(f"{job.target} cannot take the tokens: {error or 'it does not answer'}") from error
        finally:
            copy.close()

    def pool_of(self, replica_id: ReplicaId | None) -> PoolId | None:
        """None for a replica that is not connected."""
        connection = None if replica_id is None else self._core.connection(replica_id)
        return None if connection is None or connection.card is None else connection.card.pool_id

    # ---- draining ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Starts to empty every draining replica that has requests and is not being emptied yet."""
        for replica_id in self._core.draining():
            if replica_id not in self._draining and self._core.streams_at(replica_id):
                task = asyncio.create_task(self._empty(replica_id), name=f"drain-{replica_id}")
                self._draining[replica_id] = task
                task.add_done_callback(partial(self._emptied, replica_id))

    async def _empty(self, replica_id: ReplicaId) -> None:
        """Moves what can be moved now; what finds no other replica stays until it ends, or until one connects."""
        permits = asyncio.Semaphore(MAX_PARALLEL_MOVES)

        async def leave(stream: RequestStream) -> None:
            async with permits:
                candidates = self._core.candidates(stream.request.model_id)
                if stream.replica_id != replica_id or not candidates:
                    return
                try:
                    await self.move(stream, self._choose(stream, candidates), "drain")
                except RemoraError as error:
                    self._core.stats.move_failed(stream.request.model_id, "drain")
                    logger.info("request %s stays at %s: %s", stream.request_id, replica_id, error)

        async with asyncio.TaskGroup() as group:
            for stream in self._core.streams_at(replica_id):
                group.create_task(leave(stream))

    def _emptied(self, replica_id: ReplicaId, _task: asyncio.Task[None]) -> None:
        self._draining.pop(replica_id, None)

    def _choose(self, stream: RequestStream, candidates: list[Candidate]) -> ReplicaId:
        key = affinity_key(stream.request.namespace_id, stream.request.block_hashes)
        return place(key, candidates, stream.load_tokens).replica_id

    async def stop(self) -> None:
        """Gives up what is being drained."""
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
