"""A pipeline in this process: pools of all stages, and a decoder that computes further stages only when it is asked for
the result, so that whatever changes in between would be seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from engine_support import BLOCK_TOKENS, FINGERPRINT, FakeDecoder, FakeModel, Harness
from numpy.typing import NDArray

from remora.cache_actors.local_delivery import Delivery
from remora.cache_actors.local_pool import LocalPool
from remora.cache_actors.stage_pools import StagePools
from remora.deployments.pipeline.base import StageTime, StepResult, Ticket
from remora.kernels.base import KVMemory
from remora.kernels.batch import StepBatch
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base.errors import StageLost
from remora.platform.base.ids import ModelId

GROUP = LayerGroup(num_layers=1, num_kv_heads=1, head_dim=8, k_precision="fp32", v_precision="fp32")


def stage_geometries(num_stages: int) -> list[KVGeometry]:
    """Of 1, 2, 3 ... layers, so that block bytes differ."""
    return [
        KVGeometry(groups=(msgspec.structs.replace(GROUP, num_layers=stage + 1),), block_tokens=BLOCK_TOKENS)
        for stage in range(num_stages)
    ]


@dataclass
class _Step:
    ticket: Ticket
    batch: StepBatch
    tables_KSB: list[NDArray[np.int32]]


def _copy_of(batch: StepBatch) -> StepBatch:
    copy = StepBatch.__new__(StepBatch)
    for name, value in vars(batch).items():
        setattr(copy, name, value.copy() if isinstance(value, np.ndarray) else value)
    return copy


def _did(stage: int) -> StageTime:
    return StageTime(
        stage=stage,
        num_micro_batches=1,
        start_unix_ns=1,
        end_unix_ns=2,
        compute_s=0.5,
        turn_wait_s=0.0,
        bubble_s=0.25 * stage,
        hop_s=0.0,
        hop_bytes=0,
    )


class FakePipeline(FakeDecoder):
    """deployments.pipeline.base.PipelineRunner over FakeDecoders, one for each stage."""

    name = "fake pipeline"

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.stages = [FakeDecoder() for _ in range(num_stages)]
        self.num_stages = self.max_in_flight = num_stages
        #: Set by LocalStages.
        self.pools: LocalStages
        self._steps: deque[_Step] = deque()
        self._next_ticket = 0
        self.most_in_flight = 0
        self.is_lost = False
        #: Of the pool that had the fewest, when a result was asked for last.
        self.num_referenced_at_collect = 0
        #: Raised by the next `collect`.
        self.fault: Callable[[], None] = lambda: None

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    def submit(self, batch: StepBatch, memory: KVMemory) -> Ticket:
        if self.is_lost:
            raise StageLost("a stage is gone")
        assert len(self._steps) < self.max_in_flight
        logical_SB = batch.block_table_SB[: batch.num_sequences]
        tables = [self.pools.physical(stage, memory.geometry, logical_SB) for stage in range(1, self.num_stages)]
        self._compute(0, batch, memory)
        self._next_ticket += 1
        self._steps.append(_Step(Ticket(self._next_ticket), _copy_of(batch), tables))
        self.most_in_flight = max(self.most_in_flight, len(self._steps))
        return Ticket(self._next_ticket)

    def collect(self, ticket: Ticket) -> StepResult:
        if self.is_lost:
            raise StageLost("a stage is gone")
        step = self._steps.popleft()
        assert step.ticket == ticket, "steps are collected in order"
        self.fault()
        reports = [port.device.state.describe() for port in self.pools.ports]
        self.num_referenced_at_collect = min(report.num_referenced_blocks for report in reports)
        batch = step.batch
        logits_RV = np.empty((0, 0), np.float32)
        marks_S = batch.not_finite_S[: batch.num_sequences].copy()
        for stage in range(1, self.num_stages):
            batch.block_table_SB[: batch.num_sequences] = step.tables_KSB[stage - 1]
            logits_RV = self._compute(stage, batch, self.pools.ports[stage].memory)
            marks_S |= batch.not_finite_S[: batch.num_sequences]
        return StepResult(logits_RV, marks_S, tuple(_did(stage) for stage in range(self.num_stages)))

    def _compute(self, stage: int, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        decoder = self.stages[stage]
        is_last = stage == self.num_stages - 1
        decoder.logits_of, decoder.trouble, decoder.is_bad = self.logits_of, lambda history: None, self.is_bad
        if is_last:
            decoder.trouble = self.trouble
        return decoder.forward(batch, memory)

    def abandon(self) -> None:
        self._steps.clear()

    def drain(self, timeout_s: float) -> bool:
        self._steps.clear()
        return not self.is_lost


class LocalStages(StagePools):
    """Pools in this process, one a stage; in place of a LocalPool."""

    def __init__(
        self,
        num_stages: int,
        *,
        sizes: Sequence[int],
        clock: Any,
        delivery: Delivery = "inline",
        seed: int = 0,
        geometries: list[KVGeometry] | None = None,
    ) -> None:
        """`sizes`: blocks that each stage's pool has."""
        self.geometries = geometries or stage_geometries(num_stages)
        self.ports = [
            LocalPool.alone(
                geometry,
                num_blocks=sizes[stage],
                namespaces={"ns": None},
                fingerprint=FINGERPRINT + b"%d" % stage,
                clock=clock,
                delivery=delivery,
                seed=seed + stage,
            )
            for stage, geometry in enumerate(self.geometries)
        ]
        self.memory = self.ports[0].memory
        self.device = self.ports[0].device
        super().__init__(self.ports, self.geometries)

    def kill(self, stage: int) -> None:
        """The stage's process is gone, and its pool has seen it."""
        self.ports[stage].device.revoke(self.ports[stage])

    def revive(self, stage: int) -> None:
        """A new process with a new lease on the pool that is still there."""
        old = self.ports[stage]
        self.ports[stage] = old.device.attach(
            self.geometries[stage], model_id=ModelId("model"), fingerprint=FINGERPRINT + b"%d" % stage
        )
        self.restore(stage, self.ports[stage])

    def deliver_answers(self, most: int | None = None) -> int:
        return sum(port.deliver_answers(most) for port in self.ports)

    def deliver_events(self, most: int | None = None) -> int:
        return sum(port.deliver_events(most) for port in self.ports)

    @property
    def has_threads(self) -> bool:
        return any(port.has_threads for port in self.ports)

    def close(self) -> None:
        for port in self.ports:
            port.close()

    def check_integrity(self) -> None:
        super().check_integrity()
        for port in self.ports:
            port.device.state.check_integrity()


class StagedHarness(Harness):
    """An engine whose model is split into stages."""

    def __init__(self, num_stages: int, *, sizes: Sequence[int] | None = None, clock: Any, **options: Any) -> None:
        self.pipeline = FakePipeline(num_stages)
        delivery, seed = options.pop("delivery", "inline"), options.pop("seed", 0)
        stages = LocalStages(num_stages, sizes=sizes or [64] * num_stages, clock=clock, delivery=delivery, seed=seed)
        self.pipeline.pools = stages
        model = FakeModel(decoder=self.pipeline, rope_inv_freq=None)
        super().__init__(model=model, geometry=stages.geometries[0], pool=stages, clock=clock, **options)  # type: ignore[arg-type]
        self.stages = stages

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            super().step()
            self.stages.check_integrity()

    @property
    def num_referenced_blocks(self) -> int:
        return sum(port.device.state.describe().num_referenced_blocks for port in self.stages.ports)
