"""One step's computing: batch, forward pass under the step lock, grammar masks beside it, sampling.

A pass has one KV precision: sequences of several are computed one precision after the other, all in the same step.
What breaks is kept to those who broke it: when a forward pass fails as a whole, each of its sequences runs alone once.
A pass can be repeated: it writes the same KV to the same slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.port import StepGate
from remora.deployments.engine.base import EngineConfig, EngineModel
from remora.deployments.engine.batch_filler import BatchFiller
from remora.deployments.engine.grammar import GrammarFault, GrammarMatcher, GrammarWorker
from remora.deployments.engine.logits import Float32
from remora.deployments.engine.sampler import LogSumExp, Sampled, Sampler, Weigh
from remora.deployments.engine.scheduler import Scheduled
from remora.deployments.engine.sequence import Sequence
from remora.deployments.pipeline.base import StageTime
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError, StageLost

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Computed:
    """Forward passes that are done but not yet counted."""

    #: What was computed; without those that failed.
    plan: list[Scheduled]
    #: Sequences of the plan whose log has come to its end, one row of logits each.
    sampling: list[Sequence]
    logits_RV: Float32
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    forward_s: float = 0.0
    #: Of that, waiting for the device's turn, and having it.
    turn_wait_s: float = 0.0
    turn_s: float = 0.0
    #: What each stage of a pipeline did.
    stage_times: tuple[StageTime, ...] = ()

    @property
    def device_s(self) -> float:
        """Of a pipeline, whose steps overlap, the time of the stage that took longest."""
        return max((each.compute_s for each in self.stage_times), default=self.turn_s)

    def with_own_logits(self) -> Computed:
        """Itself, with logits that outlive the decoder's next pass."""
        self.logits_RV = self.logits_RV.copy()
        return self


class StepRunner:
    """Engine thread only."""

    def __init__(self, model: EngineModel, gate: StepGate, config: EngineConfig) -> None:
        self._model = model
        self._decoder = model.decoder
        self._config = config
        self._gate = gate
        #: One for each precision that has been computed in, so that rows of tables seldom change.
        self._fillers: dict[KVGeometry, BatchFiller] = {}
        self._sampler = Sampler(model.vocab_size, *_native_rows())
        self._vocab_size = model.vocab_size
        self._turn_wait_s = 0.0
        self._turn_s = 0.0
        self.grammar_worker = GrammarWorker(model.tokenizer, model.vocab_size)

    def compute(self, plan: list[Scheduled]) -> Computed:
        """Runs the forward passes; waits for the device's turns. Errors of the decoder are in the result."""
        sampling = [scheduled.sequence for scheduled in plan if scheduled.wants_logits]
        masks = self.start_masks(sampling)
        started_s = time.perf_counter()
        self._turn_wait_s = self._turn_s = 0.0
        try:
            parts = _by_precision(plan)
            if len(parts) == 1:
                computed = self._compute_part(plan)
            else:
                computed = _joined([self._compute_part(part).with_own_logits() for part in parts])
        finally:
            if masks is not None:
                masks.result()
        computed.forward_s = time.perf_counter() - started_s
        computed.turn_wait_s, computed.turn_s = self._turn_wait_s, self._turn_s
        return computed

    def sample(self, computed: Computed) -> list[tuple[Sequence, Sampled]]:
        """A token, or the reason why there is none, for each sequence in `computed.sampling`."""
        faults: list[tuple[Sequence, Sampled]] = []
        for sequence in computed.sampling:
            if sequence.grammar is not None:
                try:
                    sequence.sample_row.allowed_V = sequence.grammar.allowed()
                except GrammarFault as fault:
                    faults.append((sequence, Sampled(error=str(fault))))
        sequences, logits_RV = computed.sampling, computed.logits_RV
        if faults:
            faulty = {sequence for sequence, _ in faults}
            kept = [i for i, sequence in enumerate(sequences) if sequence not in faulty]
            sequences, logits_RV = [sequences[i] for i in kept], logits_RV[kept]
        if not sequences:
            return faults
        rows = [sequence.sample_row for sequence in sequences]
        return [*zip(sequences, self._sampler.sample(logits_RV, rows), strict=True), *faults]

    def close(self) -> None:
        self.grammar_worker.close()

    def start_masks(self, sampling: Items[Sequence]) -> Future[None] | None:
        """Begins to fill the masks of grammars; they must be full before `sample`."""
        matchers: list[GrammarMatcher] = [item.grammar for item in sampling if item.grammar is not None]
        return self.grammar_worker.fill_masks(matchers) if matchers else None

    def _compute_part(self, plan: list[Scheduled]) -> Computed:
        try:
            return self._forward(plan)
        except Exception as error:  # a back-end's own errors as well as KernelError
            _log.warning("a step of %d sequences failed: %s", len(plan), error, exc_info=True)
            return self.compute_each_alone(plan, error, self._forward)

    def _filler(self, geometry: KVGeometry) -> BatchFiller:
        filler = self._fillers.get(geometry)
        if filler is None:
            filler = self._fillers[geometry] = self.new_filler(geometry)
        return filler

    def new_filler(self, geometry: KVGeometry) -> BatchFiller:
        """With room for every step of the model."""
        return BatchFiller(
            max_tokens=self._config.max_step_tokens,
            max_sequences=self._config.max_num_seqs,
            max_blocks=-(-(self._model.max_model_len + 1) // geometry.block_tokens),
        )

    def _forward(self, plan: list[Scheduled]) -> Computed:
        """One pass over sequences of one precision. Its logits are valid until the next."""
        memory = plan[0].sequence.memory
        batch = self._filler(memory.geometry).fill(plan)
        asked_s = time.perf_counter()
        with self._gate.turn():
            given_s = time.perf_counter()
            self._turn_wait_s += given_s - asked_s
            try:
                logits_RV = self._decoder.forward(batch, memory)
            finally:
                self._turn_s += time.perf_counter() - given_s
        sampling = [scheduled.sequence for scheduled in plan if scheduled.wants_logits]
        return self.computed(plan, sampling, logits_RV, batch.not_finite_S[: len(plan)])

    def computed(
        self, plan: list[Scheduled], sampling: list[Sequence], logits_RV: Float32, not_finite_S: NDArray[np.uint8]
    ) -> Computed:
        """A pass that is done. Raises KernelError for logits of another shape than the batch asked for."""
        if logits_RV.shape != (len(sampling), self._vocab_size):
            raise KernelError(f"logits of shape {logits_RV.shape} instead of {(len(sampling), self._vocab_size)}")
        if not not_finite_S.any():
            return Computed(plan=plan, sampling=sampling, logits_RV=logits_RV)
        return self._without(not_finite_S != 0, plan, sampling, logits_RV)

    def _without(
        self, marked_S: NDArray[np.bool_], plan: list[Scheduled], sampling: list[Sequence], logits_RV: Float32
    ) -> Computed:
        """Fails the sequences whose KV is not finite. The step is not counted for them, so that what it wrote is never
        published: nobody else can come to read it."""
        failed: list[tuple[Sequence, Exception]] = []
        for (sequence, num_tokens), is_marked in zip(plan, marked_S, strict=True):
            if is_marked:
                first = sequence.num_computed_tokens
                message = f"KV of tokens {first} to {first + num_tokens - 1} is not finite (NaN or infinity)"
                _log.warning("sequence %s: %s", sequence.sequence_id, message)
                failed.append((sequence, KernelError(message)))
        bad = {sequence for sequence, _ in failed}
        kept = [row for row, sequence in enumerate(sampling) if sequence not in bad]
        return Computed(
            plan=[scheduled for scheduled in plan if scheduled.sequence not in bad],
            sampling=[sampling[row] for row in kept],
            logits_RV=logits_RV[kept],
            failed=failed,
        )

    def compute_each_alone(
        self, plan: list[Scheduled], error: Exception, forward: Callable[[list[Scheduled]], Computed]
    ) -> Computed:
        """After a pass over the plan has failed: each sequence has one of its own. Raises StageLost."""
        done: list[Scheduled] = []
        sampling: list[Sequence] = []
        rows: list[Float32] = []
        failed: list[tuple[Sequence, Exception]] = []
        for scheduled in plan:
            if len(plan) == 1:
                failed.append((scheduled.sequence, error))
                break
            try:
                alone = forward([scheduled])
            except StageLost:
                raise
            except Exception as own_error:
                failed.append((scheduled.sequence, own_error))
            else:
                rows.append(alone.logits_RV.copy())
                done.extend(alone.plan)
                sampling.extend(alone.sampling)
                failed.extend(alone.failed)
        return Computed(
            plan=done,
            sampling=sampling,
            logits_RV=np.concatenate(rows) if rows else np.empty((0, self._vocab_size), np.float32),
            failed=failed,
        )


def _by_precision(plan: list[Scheduled]) -> list[list[Scheduled]]:
    """The plan by the precision of its sequences, each in the plan's order."""
    first = plan[0].sequence.memory
    if all(scheduled.sequence.memory is first for scheduled in plan):
        return [plan]
    parts: dict[KVGeometry, list[Scheduled]] = {}
    for scheduled in plan:
        parts.setdefault(scheduled.sequence.memory.geometry, []).append(scheduled)
    return [*parts.values()]


def _joined(parts: list[Computed]) -> Computed:
    return Computed(
        plan=[scheduled for part in parts for scheduled in part.plan],
        sampling=[sequence for part in parts for sequence in part.sampling],
        logits_RV=np.concatenate([part.logits_RV for part in parts]),
        failed=[failure for part in parts for failure in part.failed],
    )


def _native_rows() -> tuple[LogSumExp | None, Weigh | None]:
    """The native routines, many times faster than numpy's, where the library is there."""
    from remora.kernels.native.library import load_library
    from remora.kernels.native.operations import log_sum_exp_rows, weigh_row

    try:
        load_library()
    except KernelError:
        return None, None
    return log_sum_exp_rows, weigh_row
