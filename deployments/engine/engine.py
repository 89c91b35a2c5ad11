"""The engine that a replica runs: one thread that turns requests into deltas, step by step.

Other threads only put things into the inbox (`submit`, `cancel`, the pool's answers and events); all state belongs to
the engine's thread, which looks at the inbox between steps. One step:

    inbox ─► deadlines ─► admissions ─► plan ─► forward pass (step lock) ─► may_emit? ─► sample ─► commit ─► emit
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import cast

from remora.cache_actors.port import BlockLoader, EngineCommand, KVSource, PoolPort, StepGate, TailBlocks
from remora.cache_actors.stage_pools import StagePools
from remora.deployments.engine.base import (
    EmitDeltas,
    EngineConfig,
    EngineModel,
    EngineStats,
    FindNamespace,
    OnFenced,
)
from remora.deployments.engine.handovers import Handovers
from remora.deployments.engine.lanes import Lanes
from remora.deployments.engine.messages import FreezeOrder, GenerationRequest, LoadReport, Resumption
from remora.deployments.engine.request_book import RequestBook
from remora.deployments.engine.scheduler import Scheduled, Scheduler
from remora.deployments.engine.sequence import Phase
from remora.deployments.engine.step_runner import Computed, StepRunner
from remora.deployments.pipeline.base import PipelineRunner
from remora.kernels.base import KVMemory
from remora.namespaces.commands import AnyAnswer, AnyEvent
from remora.platform.base.clock import Clock
from remora.platform.base.errors import RemoraError, StageLost, Unavailable
from remora.platform.base.ids import RequestId
from remora.platform.base.threads import compute_long, show_thread_name

_log = logging.getLogger(__name__)


class Engine:
    """Runs one model's sequences in the memory that a pool lends.

    Either `start` gives it a thread, or the caller makes its steps (tests); never both.
    """

    def __init__(
        self,
        model: EngineModel,
        memory: KVMemory,
        pool: PoolPort,
        gate: StepGate,
        clock: Clock,
        emit: EmitDeltas,
        *,
        find_namespace: FindNamespace,
        config: EngineConfig | None = None,
        loader: BlockLoader | None = None,
        own_pool: KVSource | None = None,
        tails: TailBlocks | None = None,
        on_fenced: OnFenced | None = None,
        on_stage_lost: OnFenced | None = None,
    ) -> None:
        """Binds itself to the pool's answers and events. `memory` is the arena in the model's precision; namespaces may
        have others. `emit` and `on_fenced` are called in the engine's thread.

        A pool that is StagePools is a pipeline's, and the model's decoder then a PipelineRunner, which takes its turns
        by itself. `on_stage_lost` is called in the engine's thread when a step finds out that a stage is gone; requests
        then wait until the pool has all stages again.

        `loader` brings blocks from other pools, and converts those that `own_pool`, by which it knows this one, has in
        another precision; without them everything that is not in this pool as it is wanted is computed. `tails` brings
        what no pool knows of yet when a running request is handed over.
        """
        self._config = config if config is not None else EngineConfig()
        self._pool = pool
        self._clock = clock
        self._emit_deltas = emit
        self._on_fenced = on_fenced
        self._scheduler = Scheduler(self._config)
        self._runner = StepRunner(model, gate, self._config)
        self._on_stage_lost = on_stage_lost
        self._lanes: Lanes | None = None
        if isinstance(pool, StagePools):
            self._lanes = Lanes(self._runner, cast(PipelineRunner, model.decoder), pool)
        self._book = RequestBook(
            model,
            pool,
            self._scheduler,
            self._runner.grammar_worker,
            self._config,
            memory=memory,
            loader=loader,
            own_pool=own_pool,
            find_namespace=find_namespace,
            post=self._post,
            fence=self._fence,
        )
        if self._lanes is not None:
            self._book.link.flying = self._lanes.flying
            self._scheduler.num_lanes = self._lanes.num_lanes
        self._handovers = Handovers(self._book, self._scheduler, tails)
        self._name = model.name
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._accepting = threading.Lock()
        self._is_stopping = False
        self._is_fenced = False
        pool.bind(self._on_answer, self._on_event)

    # ---- from any thread

    def submit(self, request: GenerationRequest) -> None:
        """Takes a request; everything that comes of it, errors included, leaves as deltas.

        A request with the id of a live one replaces it, without a word about the old one. Raises Unavailable once the
        engine is stopped or fenced.
        """
        now_s = self._clock.now_s()
        # Under the lock: what is accepted is either served or answered by `stop`.
        with self._accepting:
            if self._is_stopping or self._is_fenced:
                raise Unavailable(f"The replica of {self._name!r} is stopping; send the request again.")
            self._post(lambda: self._book.submit(request, now_s))

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request within one step, wherever it is; its blocks go back. Unknown ids are ignored."""
        self._post(lambda: self._book.cancel(request_id))

    def freeze(self, order: FreezeOrder) -> None:
        """Stops a request at the next step boundary; its handover comes behind its last token. It keeps its blocks
        until it is cancelled. Unknown ids are ignored."""
        self._post(lambda: self._freeze(order))

    def resume(self, resumption: Resumption) -> None:
        """Lets a standby go on. Unknown ids are ignored."""
        self._post(lambda: self._handovers.resume(resumption))

    def use_pipeline(self, pipeline: PipelineRunner) -> None:
        """Before the next step: the stages have started again. To be said before the pool has them back."""
        lanes = self._lanes
        assert lanes is not None, "only a pipeline has stages"
        self._post(lambda: lanes.use(pipeline))

    def stats(self) -> EngineStats:
        """Counters and gauges of now."""
        sequences = [sequence for live in list(self._book.live.values()) for sequence in live.sequences]
        phases = Counter(sequence.phase for sequence in sequences)
        return self._book.counters.stats(
            num_running=phases[Phase.RUNNING],
            num_waiting=len(sequences) - phases[Phase.RUNNING] - phases[Phase.FINISHED],
            num_parked=phases[Phase.PARKED],
            num_published_blocks=self._book.link.num_published_blocks,
            is_fenced=self._is_fenced,
        )

    def load(self) -> LoadReport:
        """What is in work and in the queue now."""
        return LoadReport(
            load_tokens=self._book.counters.load_tokens,
            waiting_tokens=self._scheduler.waiting_tokens,
            parked_tokens=self._scheduler.parked_tokens,
        )

    def start(self) -> None:
        """Gives the engine its thread."""
        if self._thread is not None:
            raise RuntimeError("the engine has been started already")
        self._thread = threading.Thread(target=self._run, name=f"engine-{self._name}", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends what is live with an error that invites to try elsewhere, gives blocks back and ends the thread."""
        with self._accepting:
            self._is_stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise RuntimeError(f"the engine's thread did not end within {timeout_s:g} s")
            self._thread = None
        if self._lanes is not None:
            self._lanes.close()
        self._read_inbox()
        self._end_all(Unavailable(f"The replica of {self._name!r} is stopping; send the request again."))
        self._runner.close()

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    def _on_answer(self, command: EngineCommand, answer: AnyAnswer) -> None:
        self._post(lambda: self._book.link.handle_answer(command, answer, self._clock.now_s()))

    def _on_event(self, event: AnyEvent) -> None:
        self._post(lambda: self._book.link.handle_event(event))

    # ---- the engine's thread

    def _freeze(self, order: FreezeOrder) -> None:
        lanes = self._lanes
        try:
            # A token that is under way belongs before the handover.
            while lanes:
                self._settle(lanes.finish())
        except StageLost as error:
            assert lanes is not None, "only stages can be lost"
            self._lose_stages(lanes, [], error)
        self._handovers.freeze(order)
        # Not behind the next step of the others.
        self._emit()

    def step(self) -> bool:
        """Does whatever can be done now, at most one forward pass. False if there was nothing to compute."""
        if self._is_fenced:
            self._inbox.clear()
            return False
        started_s = time.perf_counter()
        book, scheduler = self._book, self._scheduler
        self._read_inbox()
        now_s = self._clock.now_s()
        book.expire(now_s)
        book.release_followers()
        book.edit_contexts()
        book.link.ask_for_blocks(scheduler.running, now_s)
        # Memory that a preemption freed is for those who lacked it; all others come a step later.
        if not book.has_preempted:
            book.admit(now_s)
        book.has_preempted = False
        book.link.flush()
        # A pool in this process has answered by now.
        self._read_inbox()
        lanes = self._lanes
        plan = [] if self._is_fenced else scheduler.plan_step()
        is_busy, forward_s = bool(plan) or bool(lanes), 0.0
        if lanes is not None:
            forward_s = self._compute_in_lanes(lanes, plan)
        elif plan:
            forward_s = self._settle(self._runner.compute(plan))
        if self._is_fenced:
            return False
        self._handovers.announce()
        book.link.publish(scheduler.running, self._clock.now_s())
        book.link.flush()
        self._emit()
        if not is_busy:
            if self._config.debug and not self._inbox:
                self.check_integrity()
            return False
        step_s = time.perf_counter() - started_s
        book.counters.num_steps += 1
        book.counters.step_s.observe(step_s)
        book.counters.step_overhead_s.observe(step_s - forward_s)
        return True

    def _read_inbox(self) -> None:
        self._wake.clear()
        while self._inbox and not self._is_fenced:
            self._inbox.popleft()()

    def _compute_in_lanes(self, lanes: Lanes, plan: list[Scheduled]) -> float:
        """Begins a step, and ends the oldest when all lanes are busy or there is nothing to begin; as `_settle`."""
        started_s = time.perf_counter()
        forward_s = 0.0
        try:
            if plan:
                self._begin(lanes, plan)
                forward_s = time.perf_counter() - started_s
            if lanes.is_full or (lanes and not plan):
                forward_s += self._settle(lanes.finish())
        except StageLost as error:
            self._lose_stages(lanes, plan, error)
        return forward_s

    def _begin(self, lanes: Lanes, plan: list[Scheduled]) -> None:
        """Raises StageLost."""
        try:
            lanes.begin(plan)
        except StageLost:
            raise
        except Exception as error:  # stage 0 could not compute it; the steps before it are not concerned
            _log.warning("a step of %d sequences failed: %s", len(plan), error, exc_info=True)
            while lanes:
                self._settle(lanes.finish())
            current = [scheduled for scheduled in plan if scheduled.sequence.phase is Phase.RUNNING]
            self._settle(lanes.compute_each_alone(current, error))

    def _lose_stages(self, lanes: Lanes, plan: list[Scheduled], error: StageLost) -> None:
        """Whoever was computed for gives its blocks back and comes again."""
        _log.error("the pipeline of %s is broken: %s", self._name, error)
        lost = [*lanes.abandon(), *(scheduled.sequence for scheduled in plan)]
        assert isinstance(self._pool, StagePools), "only a pipeline has lanes"
        self._pool.lose_all(str(error))
        for sequence in dict.fromkeys(lost):
            if sequence.phase is Phase.RUNNING:
                self._book.on_preempted(sequence, str(error))
        if self._on_stage_lost is not None:
            self._on_stage_lost(str(error))

    def _settle(self, computed: Computed) -> float:
        """Sampling and commit behind a forward pass; returns the seconds of the pass, its turn included."""
        book = self._book
        book.counters.turn_wait_s.observe(computed.turn_wait_s)
        book.counters.turn_s += computed.turn_s
        book.counters.add_stages(computed.stage_times)
        if not self._pool.may_emit():
            self._fence("the lease's generation or the pool's incarnation has changed")
            return computed.forward_s
        if computed.failed:
            book.counters.num_failed_steps += 1
        else:
            self._scheduler.learn(computed.plan, computed.device_s)
        for sequence, error in computed.failed:
            book.fail(sequence, error)
        for sequence, num_tokens in computed.plan:
            is_output = sequence.computes_output
            sequence.num_computed_tokens += num_tokens
            sequence.spans.stepped(computed.stage_times)
            if not is_output:
                book.counters.num_prompt_tokens += num_tokens
            self._scheduler.waiting.charge(sequence, num_tokens, is_output=is_output)
        now_s = self._clock.now_s()
        for sequence, sampled in self._runner.sample(computed):
            try:
                book.commit(sequence, sampled, now_s)
            except Exception as error:  # whatever it is, it concerns this sequence
                _log.warning("a token of %s could not be taken: %s", sequence.sequence_id, error, exc_info=True)
                book.fail(sequence, error)
        return computed.forward_s

    def _emit(self) -> None:
        if not self._book.outbox:
            return
        if not self._pool.may_emit():
            self._fence("the lease's generation or the pool's incarnation has changed")
            return
        for router_id, deltas in self._book.outbox.take():
            try:
                self._emit_deltas(router_id, deltas)
            except Exception:  # the way out of one router is not the others' concern
                _log.exception("deltas for router %s are lost", router_id)

    def _fence(self, reason: str) -> None:
        """The memory is no longer ours: whatever was computed in it is worth nothing, and nothing leaves any more."""
        if self._is_fenced:
            return
        self._is_fenced = True
        _log.error("engine of %s is fenced: %s", self._name, reason)
        if self._on_fenced is not None:
            self._on_fenced(reason)

    def _end_all(self, error: RemoraError) -> None:
        if self._is_fenced:
            return
        for live in list(self._book.live.values()):
            self._book.end(live, error)
        self._book.link.flush()
        self._emit()

    def _run(self) -> None:
        show_thread_name(f"engine-{self._name}")
        compute_long()
        while not self._is_stopping:
            try:
                has_computed = self.step()
            except Exception as error:
                _log.exception("a step of the engine of %s failed; its requests end", self._name)
                self._recover(error)
                has_computed = False
            if not has_computed and not self._inbox:
                self._wake.wait(self._wait_s())

    def _wait_s(self) -> float:
        """How long to sleep without work."""
        if self._scheduler.running:
            return self._config.extend_retry_s  # they wait for blocks
        return self._config.idle_wait_s if self._book.live else self._config.rest_wait_s

    def _recover(self, error: Exception) -> None:
        """Ends what is live after a bug, so that the next requests find a working engine; if that fails too, fences."""
        self._book.counters.num_failed_steps += 1
        try:
            self._end_all(RemoraError(f"The engine failed: {type(error).__name__}: {error}"))
            self.check_integrity()
        except Exception as second_error:
            _log.exception("the engine of %s cannot be brought back to order", self._name)
            self._fence(f"{type(second_error).__name__}: {second_error}")

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant of the engine's state does not hold. Between steps only."""
        self._book.check_integrity()
        if self._lanes is not None:
            self._lanes.check_integrity()
