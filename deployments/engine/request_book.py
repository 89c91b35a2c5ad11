"""The requests an engine works on, and what happens to each: begin, admission, tokens, preemption, end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from concurrent.futures import Future

from remora.cache_actors.port import BlockLoader, KVSource, PoolPort
from remora.deployments.engine.base import EngineConfig, EngineModel, FindNamespace
from remora.deployments.engine.deadlines import RETRY_AFTER_S, Deadlines, too_late
from remora.deployments.engine.engine_stats import EngineCounters
from remora.deployments.engine.grammar import GrammarMatcher, GrammarWorker
from remora.deployments.engine.kv_loads import KVLoads
from remora.deployments.engine.live_request import LiveRequest, make_sequences
from remora.deployments.engine.messages import FinishReason, GenerationRequest
from remora.deployments.engine.output import Outbox, Step, error_delta, token_delta
from remora.deployments.engine.pool_link import PoolLink
from remora.deployments.engine.request_check import check_request
from remora.deployments.engine.sampler import Sampled
from remora.deployments.engine.scheduler import Scheduler
from remora.deployments.engine.sequence import Phase, Sequence
from remora.kernels.base import KVMemory
from remora.kernels.mover import Mover, mover_of
from remora.namespaces.commands import Admitted, OverQuota, Refused
from remora.namespaces.sequence_commands import Edited
from remora.platform.base import errors
from remora.platform.base.errors import IntegrityError, KernelError, RemoraError
from remora.platform.base.ids import BlockHash, RequestId

_log = logging.getLogger(__name__)

#: When a request that can never fit may try again.
_RETRY_AFTER_NEVER_FITS_S = 60.0


class RequestBook:
    """Engine thread only. Listens to the pool (pool_link.PoolListener)."""

    def __init__(
        self,
        model: EngineModel,
        pool: PoolPort,
        scheduler: Scheduler,
        grammar_worker: GrammarWorker,
        config: EngineConfig,
        *,
        find_namespace: FindNamespace,
        loader: BlockLoader | None,
        own_pool: KVSource | None,
        memory: KVMemory,
        post: Callable[[Callable[[], None]], None],
        fence: Callable[[str], None],
    ) -> None:
        """`memory`: the arena in its own precision; `post` runs a function before the next step; `fence` ends it."""
        self._model = model
        self._scheduler = scheduler
        self._grammar_worker = grammar_worker
        self._memory = memory
        self._block_tokens = memory.geometry.block_tokens
        self._find_namespace = find_namespace
        self._post = post
        self._fence = fence
        self.link = PoolLink(pool, self, config, copy_block=lambda each, *places: self.mover(each).copy_block(*places))
        self.counters = EngineCounters()
        self._loads = KVLoads(loader, own_pool, self.counters, post=post, on_loaded=self.on_loaded, mover=self.mover)
        self.outbox = Outbox()
        self.live: dict[RequestId, LiveRequest] = {}
        #: Requests whose further choices wait for the first one's prompt.
        self._expecting: list[LiveRequest] = []
        self._deadlines = Deadlines()
        #: Set by a preemption, cleared by the step that therefore admits nobody.
        self.has_preempted = False

    # ---- begin

    def submit(self, request: GenerationRequest, now_s: float) -> None:
        """Takes a request in, or answers why it cannot be served. A request with a known id replaces the old one."""
        self.counters.num_requests += 1
        if (old := self.live.pop(request.request_id, None)) is not None:
            for sequence in old.sequences:
                self._retire(sequence)
        try:
            max_tokens = check_request(request, self._model)
            live = LiveRequest(request, self._find_namespace(request.namespace_id), self._memory, now_s)
            live.sequences = make_sequences(live, self._model, max_tokens=max_tokens, block_tokens=self._block_tokens)
        except Exception as error:  # a request that cannot be read must not stop those that can
            if not isinstance(error, RemoraError):
                _log.exception("request %s could not be taken in", request.request_id)
            for choice_index in range(min(max(1, request.num_choices), 128)):
                given = request.output_token_ids[choice_index : choice_index + 1]
                num_given = len(given[0]) if given else 0
                self.outbox.add(request.router_id, error_delta(request, choice_index, num_given, error))
                self.counters.num_finished["error"] += 1
            return
        self.live[request.request_id] = live
        self._deadlines.add(live)
        for sequence in live.sequences:
            self.counters.load_tokens += sequence.num_tokens
            self._scheduler.waiting.open(sequence.namespace_id)
        if request.grammar is not None:
            future = self._grammar_worker.compile(request.grammar)
            future.add_done_callback(lambda done: self._post(lambda: self._compiled(live, done)))
        else:
            self._begin(live)

    def _compiled(self, live: LiveRequest, future: Future[GrammarMatcher]) -> None:
        if self.live.get(live.request.request_id) is not live or future.cancelled():
            return
        if (error := future.exception()) is not None:
            self.end(live, error)
            return
        for sequence in live.sequences:
            sequence.grammar = future.result().copy()
            sequence.update_bans()
        self._begin(live)

    def _begin(self, live: LiveRequest) -> None:
        """Goes behind what clients already have, and queues the first choice that is not at its end."""
        for sequence, token_ids in zip(live.sequences, live.request.output_token_ids, strict=False):
            self.go_behind(sequence, token_ids)
        self._promote(live)

    def go_behind(self, sequence: Sequence, token_ids: Items[int]) -> bool:
        """Takes output that the client has already; False if that was its end."""
        num_before = sequence.num_tokens
        fault: RemoraError | None = None
        ended: Step | None = None
        try:
            ended = sequence.replay(token_ids)
        except RemoraError as error:
            fault = error
        self.counters.load_tokens += sequence.num_tokens - num_before
        if fault is not None:
            self.fail(sequence, fault)
        elif ended is not None:
            self._finish(sequence, ended.finish_reason or "stop", stop_reason=ended.stop_reason)
        return fault is None and ended is None

    def _promote(self, live: LiveRequest) -> None:
        """Queues a request's first held choice; the others wait until its prompt can be found in the cache."""
        held = [sequence for sequence in live.sequences if sequence.phase is Phase.HELD]
        if held:
            live.lead = held[0]
            self._scheduler.enqueue(held[0])
        if len(held) > 1:
            self._expecting.append(live)

    def release_followers(self) -> None:
        """Queues the further choices of requests whose prompt is computed and published."""
        if not self._expecting:
            return
        expecting, self._expecting = self._expecting, []
        for live in expecting:
            lead = live.lead
            assert lead is not None
            if lead.finish_reason in ("abort", "error"):
                self._promote(live)
            elif lead.phase is Phase.FINISHED or lead.is_prompt_published:
                for sequence in live.sequences:
                    if sequence.phase is Phase.HELD:
                        self._scheduler.enqueue(sequence)
            else:
                self._expecting.append(live)

    # ---- admission

    def admit(self, now_s: float) -> None:
        """Asks the pool for the next sequences, as many as there are places in the batch."""
        while (sequence := self._scheduler.next_to_admit()) is not None:
            # The pool's line is first come first served: a less urgent one must not stand before it.
            for parked in self._scheduler.parked_of(sequence.namespace_id):
                self._take_back(parked)
            self._scheduler.set_admitting(sequence)
            sequence.spans.asked()
            deadline_s = None if sequence.live.has_started else sequence.live.deadline_s
            self.link.admit(sequence, deadline_s)

    def expire(self, now_s: float) -> None:
        """Ends requests that have not started by their deadline."""
        for live in self._deadlines.due(now_s):
            if self.live.get(live.request.request_id) is live:
                self.end(live, too_late(live.request))

    def on_admitted(self, sequence: Sequence, admitted: Admitted) -> None:
        num_found = admitted.num_cached_blocks * self._block_tokens
        loads = self._loads.wanted(sequence, admitted)
        if num_found < sequence.window.kept_end and not loads:
            self._lose_kept(sequence, num_found)
            return
        self._scheduler.set_running(sequence)
        try:
            sequence.start_run(admitted)
        except IntegrityError as error:
            self.fail(sequence, error)
            return
        live = sequence.live
        num_cached = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if live.num_cached_tokens is None:
            live.num_cached_tokens = num_cached
        self.counters.num_cached_tokens += num_cached
        self._scheduler.hints.add(sequence.block_names.of(sequence.hashes[: admitted.num_cached_blocks]))
        sequence.spans.admitted(sequence, admitted)
        if loads:
            self._loads.begin(sequence, loads)

    def on_loaded(self, sequence: Sequence) -> None:
        """Everything that could be copied or converted is here; the rest is computed."""
        if sequence.num_computed_tokens < sequence.window.kept_end:
            self._lose_kept(sequence, sequence.num_computed_tokens)

    def _lose_kept(self, sequence: Sequence, num_found: int) -> None:
        """KV that depends on tokens that are gone is lost. What is computed instead has another name: look it up."""
        sequence.window.forget(num_found)
        sequence.forget_hashes(num_found)
        self._take_back(sequence)
        # What did come is to be found by the next admission.
        self.link.flush()

    def on_parked(self, sequence: Sequence) -> None:
        """One of a namespace waits at the pool, for its line; the others wait here, where priorities count and no
        place is promised. Several can be parked at once when they were asked for before the first answer came."""
        if self._scheduler.parked_of(sequence.namespace_id):
            self._take_back(sequence)
        else:
            self._scheduler.set_parked(sequence)

    def _take_back(self, sequence: Sequence) -> None:
        """Withdraws an admission; the sequence goes back to its place in the queue."""
        self.hold(sequence)
        self._scheduler.enqueue(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Takes a sequence from the pool or the queue; it has nothing until it is queued again."""
        self._scheduler.withdraw(sequence, Phase.HELD)
        self.link.release(sequence)

    def on_over_quota(self, sequence: Sequence, answer: OverQuota) -> None:
        sequence.spans.over_quota(sequence)
        never_fits = answer.needed_bytes > answer.limit_bytes
        error = errors.OverQuota(
            f"Namespace {answer.namespace_id!r} cannot hold this request: {answer.reason} "
            f"({answer.needed_bytes} bytes needed, limit {answer.limit_bytes}).",
            retry_after_s=_RETRY_AFTER_NEVER_FITS_S if never_fits else RETRY_AFTER_S,
        )
        if sequence.live.has_started:
            self.fail(sequence, error)
        else:
            self.end(sequence.live, error)

    def on_preempted(self, sequence: Sequence, reason: str) -> None:
        """Gives the blocks back and queues the sequence again, with all its tokens."""
        _log.debug("%s is preempted: %s", sequence.sequence_id, reason)
        self.has_preempted = True
        self.counters.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.spans.preempted(sequence, reason)
        self._take_back(sequence)

    # ---- contexts

    def mover(self, sequence: Sequence) -> Mover:
        return mover_of(self._model.decoder, sequence.memory, self._model.rope_inv_freq)

    def edit_contexts(self) -> None:
        """Takes out of running sequences what must leave them now."""
        for sequence in list(self._scheduler.running):
            if (removal := sequence.due_removal) is not None:
                if self.mover(sequence).can_move:
                    self.link.edit(sequence, removal)
                else:
                    self.on_edit_refused(sequence, "the KV of this model cannot be moved")

    def on_edited(self, sequence: Sequence, edited: Edited) -> None:
        """Moves what is left, and goes on with it."""
        try:
            self.mover(sequence).move(edited.moves)
        except Exception as error:  # whatever it is, it concerns this sequence
            _log.exception("the tokens of %s cannot be moved", sequence.sequence_id)
            self.fail(sequence, error)
            return
        self.link.settle(sequence)
        self.counters.load_tokens -= sequence.take_edit(edited.num_kept_blocks, edited.blocks)

    def on_edit_refused(self, sequence: Sequence, reason: str) -> None:
        """Computes what is left anew."""
        _log.warning("%s: tokens behind an edit are computed anew: %s", sequence.sequence_id, reason)
        self.counters.load_tokens -= sequence.take_out(kv_kept=False)
        self.has_preempted = True
        self._take_back(sequence)

    def on_pool_fault(self, sequence: Sequence, refused: Refused) -> None:
        self.fail(sequence, refused.as_error())

    def on_published(self, hashes: Iterable[BlockHash]) -> None:
        self._scheduler.hints.add(hashes)

    def on_lease_lost(self, reason: str) -> None:
        self._fence(reason)

    # ---- tokens

    def commit(self, sequence: Sequence, sampled: Sampled, now_s: float) -> None:
        """Appends the sampled token, and ends the choice if that is its last."""
        if sampled.error is not None:
            self.fail(sequence, KernelError(sampled.error))
            return
        counters = self.counters
        counters.load_tokens += 1
        text, finish_reason, stop_reason = sequence.accept(sampled.token_id)
        counters.num_output_tokens += 1
        if sequence.last_token_s is None:
            counters.time_to_first_token_s.observe(now_s - sequence.live.submitted_s)
            sequence.spans.first_token(sequence)
        else:
            counters.inter_token_s.observe(now_s - sequence.last_token_s)
        sequence.last_token_s = now_s
        self._send(sequence, (sampled.token_id,), text, sampled, finish_reason, stop_reason)
        if finish_reason is not None:
            self._retire(sequence, finish_reason)

    def _send(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        text: str,
        sampled: Sampled | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        delta = token_delta(sequence, token_ids, text, sampled, finish_reason, stop_reason)
        sequence.has_sent = True
        sequence.num_sent_tokens += len(token_ids)
        self.outbox.add(sequence.live.request.router_id, delta)

    # ---- end

    def cancel(self, request_id: RequestId) -> None:
        """Ends all choices of a request; unknown ids are ignored."""
        if (live := self.live.get(request_id)) is None:
            return
        for sequence in live.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._finish(sequence, "abort")

    def end(self, live: LiveRequest, error: BaseException) -> None:
        """Ends all choices of a request with an error."""
        for sequence in live.sequences:
            if sequence.phase is not Phase.FINISHED:
                self.fail(sequence, error)

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """Ends one choice with an error."""
        request = sequence.live.request
        delta = error_delta(request, sequence.choice_index, sequence.num_sent_tokens, error)
        self.outbox.add(request.router_id, delta)
        self._retire(sequence, "error")

    def _finish(self, sequence: Sequence, finish_reason: FinishReason, *, stop_reason: str | int | None = None) -> None:
        """Ends one choice without another token."""
        self._send(sequence, (), "", finish_reason=finish_reason, stop_reason=stop_reason)
        self._retire(sequence, finish_reason)

    def _retire(self, sequence: Sequence, finish_reason: FinishReason | None = None) -> None:
        """Takes the choice out of the engine; its blocks go back with the next flush. None: it was replaced."""
        if sequence.phase is Phase.FINISHED:
            return
        self._scheduler.withdraw(sequence, Phase.FINISHED)
        self.link.release(sequence)
        self._scheduler.waiting.close(sequence.namespace_id)
        sequence.finish_reason = finish_reason or "abort"
        sequence.spans.finished(sequence, sequence.finish_reason)
        self.counters.load_tokens -= sequence.num_tokens
        if finish_reason is not None:
            self.counters.num_finished[finish_reason] += 1
        live = sequence.live
        if self.live.get(live.request.request_id) is live and all(
            other.phase is Phase.FINISHED for other in live.sequences
        ):
            del self.live[live.request.request_id]

    def check_integrity(self) -> None:
        """Raises IntegrityError when requests, phases, accounts and the pool's view do not agree."""
        self._scheduler.check_integrity()
        self.link.check_integrity()
        num_in_pool = len(self._scheduler.running) + len(self._scheduler.admitting) + len(self._scheduler.parked)
        if num_in_pool != self.link.num_known:
            raise IntegrityError(
                f"{num_in_pool} sequences hold or await blocks, {self.link.num_known} are on the books"
            )
        sequences = [sequence for live in self.live.values() for sequence in live.sequences]
        load = sum(sequence.num_tokens for sequence in sequences if sequence.phase is not Phase.FINISHED)
        if load != self.counters.load_tokens:
            raise IntegrityError(f"live sequences have {load} tokens, {self.counters.load_tokens} are counted")
        queued = sum(sequence.num_tokens for sequence in sequences if sequence.phase is Phase.WAITING)
        if queued != self._scheduler.waiting.num_tokens:
            raise IntegrityError(f"queued ones have {queued} tokens, {self._scheduler.waiting.num_tokens} are counted")
        for sequence in sequences:
            sequence.check_integrity()
