"""Steps of a pipeline, several under way: while a stage works on one, the stage before works on the next.

    begin(plan) ─► stage 0, in this thread ─► the other stages
    finish()    ◄─ logits of the oldest       meanwhile begin(another plan)

Sequences change only between `begin` and `finish`, as in a pipeline of one. What was begun for a run that is over by
then is dropped; its blocks are held back until then (`flying`). A step that fails takes those behind it along, because
they may have read what it did not write; its sequences run alone once, the others are planned again. When a stage is
lost nothing that is under way comes to an end.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass

from remora.cache_actors.stage_pools import StagePools
from remora.deployments.engine.batch_filler import BatchFiller
from remora.deployments.engine.logits import Float32
from remora.deployments.engine.scheduler import Scheduled
from remora.deployments.engine.sequence import Sequence
from remora.deployments.engine.step_runner import Computed, StepRunner
from remora.deployments.pipeline.base import PipelineRunner, StepResult, Ticket
from remora.platform.base.errors import StageLost
from remora.platform.base.ids import SequenceId

_log = logging.getLogger(__name__)

#: For stages to come to rest when the engine stops.
_DRAIN_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Flight:
    """One step under way."""

    ticket: Ticket
    plan: list[Scheduled]
    #: The runs that the plan was made for.
    run_ids: list[SequenceId]
    sampling: list[Sequence]
    masks: Future[None] | None


class Lanes:
    """Engine thread only."""

    def __init__(self, runner: StepRunner, pipeline: PipelineRunner, pools: StagePools) -> None:
        self._runner = runner
        self._pipeline = pipeline
        self._pools = pools
        self._flights: deque[_Flight] = deque()
        #: One filler for each lane: rows of tables seldom change within one.
        self._fillers: list[BatchFiller] = []
        self._next_filler = 0
        self.num_lanes = min(pipeline.num_stages, pipeline.max_in_flight)
        #: Runs that steps under way write for, and how many steps.
        self.flying: Counter[SequenceId] = Counter()

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        return len(self._flights) >= self.num_lanes

    def begin(self, plan: list[Scheduled]) -> None:
        """Computes stage 0 and sends the rest on its way. Raises StageLost, and what the decoder raises."""
        sampling = [scheduled.sequence for scheduled in plan if scheduled.wants_logits]
        ticket = self._submit(plan)
        run_ids = [SequenceId(sequence.sequence_id or "") for sequence, _ in plan]
        self._flights.append(_Flight(ticket, plan, run_ids, sampling, self._runner.start_masks(sampling)))
        self.flying.update(run_ids)
        for sequence, num_tokens in plan:
            sequence.num_flying_tokens += num_tokens

    def finish(self) -> Computed:
        """Waits for the oldest step. What a stage could not compute is in the result; raises StageLost."""
        started_s = time.perf_counter()
        flight = self._flights[0]
        try:
            result = self._collect(flight.ticket)
        except StageLost:
            raise
        except Exception as error:  # a back-end's own errors as well as KernelError
            _log.warning("a step of %d sequences failed: %s", len(flight.plan), error, exc_info=True)
            self._discard()
            computed = self.compute_each_alone(self._current(flight), error)
        else:
            self._land(flight)
            computed = self._take(flight, result)
        computed.forward_s = time.perf_counter() - started_s
        return computed

    def compute_each_alone(self, plan: list[Scheduled], error: Exception) -> Computed:
        """Each sequence of a plan that failed with this error, in a step of its own. Nothing may be under way."""
        return self._runner.compute_each_alone(plan, error, self._forward)

    def abandon(self) -> list[Sequence]:
        """A stage is lost: nothing under way comes to an end. Returns the sequences that were computed for."""
        sequences = [scheduled.sequence for flight in self._flights for scheduled in self._current(flight)]
        self._pipeline.abandon()
        while self._flights:
            self._land(self._flights[0])
        return list(dict.fromkeys(sequences))

    def use(self, pipeline: PipelineRunner) -> None:
        """The stages have started again, and are reached by this."""
        self.abandon()
        old, self._pipeline = self._pipeline, pipeline
        old.close()

    def close(self) -> None:
        """Waits for stages that still compute, then forgets what they did."""
        if self._flights and not self._pipeline.drain(_DRAIN_TIMEOUT_S):
            _log.warning("the stages did not come to rest within %g s", _DRAIN_TIMEOUT_S)
        self.abandon()

    # ---- inside

    def _submit(self, plan: list[Scheduled]) -> Ticket:
        memory = plan[0].sequence.memory
        if not self._fillers:
            self._fillers = [self._runner.new_filler(memory.geometry) for _ in range(self.num_lanes)]
        batch = self._fillers[self._next_filler].fill(plan)
        self._next_filler = (self._next_filler + 1) % len(self._fillers)
        self._pools.select([(SequenceId(each.sequence_id or ""), each.num_blocks) for each, _ in plan])
        return self._pipeline.submit(batch, memory)

    def _collect(self, ticket: Ticket) -> StepResult:
        result = self._pipeline.collect(ticket)
        # Before anything of it is believed: a stage whose lease is lost may have written anywhere, or nothing.
        self._pools.check_stages()
        return result

    def _forward(self, plan: list[Scheduled]) -> Computed:
        """One step, alone in the pipeline."""
        sampling = [scheduled.sequence for scheduled in plan if scheduled.wants_logits]
        result = self._collect(self._submit(plan))
        return self._runner.computed(plan, sampling, result.logits_RV, result.not_finite_S)

    def _take(self, flight: _Flight, result: StepResult) -> Computed:
        """What was computed for runs that still are."""
        if flight.masks is not None:
            flight.masks.result()
        current = {sequence for sequence, _ in self._current(flight)}
        logits_RV: Float32 = result.logits_RV
        plan, sampling, marks_S = flight.plan, flight.sampling, result.not_finite_S[: len(flight.plan)]
        if len(current) != len(plan):
            kept = [row for row, sequence in enumerate(sampling) if sequence in current]
            marks_S = marks_S[[row for row, (sequence, _) in enumerate(plan) if sequence in current]]
            plan = [scheduled for scheduled in plan if scheduled.sequence in current]
            sampling, logits_RV = [sampling[row] for row in kept], logits_RV[kept]
        for sequence, num_tokens in plan:
            sequence.num_flying_tokens -= num_tokens
        computed = self._runner.computed(plan, sampling, logits_RV, marks_S)
        computed.turn_wait_s = sum(each.turn_wait_s for each in result.times)
        computed.stage_times = result.times
        return computed

    def _land(self, flight: _Flight) -> None:
        """The oldest step is over; its blocks are nobody's but their sequence's."""
        self._flights.popleft()
        self.flying.subtract(flight.run_ids)
        for run_id in flight.run_ids:
            if not self.flying[run_id]:
                del self.flying[run_id]

    def _discard(self) -> None:
        """Waits for everything under way, and takes nothing of it."""
        for flight in list(self._flights):
            if flight is not self._flights[0]:
                raise AssertionError("steps end in order")
            self._land(flight)
            for scheduled in self._current(flight):
                scheduled.sequence.num_flying_tokens = 0
            if self._flights:
                try:
                    self._pipeline.collect(self._flights[0].ticket)
                except StageLost:
                    raise
                except Exception as error:
                    _log.warning("a step behind it failed, too: %s", error)

    @staticmethod
    def _current(flight: _Flight) -> list[Scheduled]:
        """Of the plan, those whose run goes on."""
        return [
            scheduled
            for scheduled, run_id in zip(flight.plan, flight.run_ids, strict=True)
            if scheduled.sequence.sequence_id == run_id
        ]

    def check_integrity(self) -> None:
        """Raises AssertionError when what flies does not agree with the steps under way."""
        flying = Counter(run_id for flight in self._flights for run_id in flight.run_ids)
        assert flying == self.flying, f"{flying} are under way, {self.flying} are on the books"
