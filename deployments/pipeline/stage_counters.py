"""Sums over what a stage did: since its start for metrics, and over a step for the trace."""

from __future__ import annotations

from collections.abc import Iterable

from remora.deployments.pipeline.base import StageStats, StageTime
from remora.deployments.pipeline.message import MicroTime


class StageCounters:
    """One writer, any reader."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._num_micro_batches = self._num_tokens = 0
        self._sum = MicroTime()

    def add(self, time: MicroTime, num_tokens: int) -> None:
        self._num_micro_batches += 1
        self._num_tokens += num_tokens
        # Times may come out of an array: sums are plain numbers.
        self._sum = MicroTime(*(float(a + b) for a, b in zip(self._sum, time, strict=True)))

    def add_bubble(self, bubble_s: float) -> None:
        self._sum = self._sum._replace(bubble_s=self._sum.bubble_s + bubble_s)

    def stats(self) -> StageStats:
        total = self._sum
        return StageStats(
            stage=self._stage,
            num_micro_batches=self._num_micro_batches,
            num_tokens=self._num_tokens,
            compute_s=total.compute_s,
            turn_wait_s=total.turn_wait_s,
            bubble_s=total.bubble_s,
            hop_s=total.hop_s,
            hop_bytes=int(total.hop_bytes),
        )


def add_to(sums: dict[int, StageTime], stage_times: Iterable[StageTime]) -> None:
    """Adds what stages did for one more step to what they did before, by stage."""
    for each in stage_times:
        before = sums.get(each.stage)
        sums[each.stage] = each if before is None else _together(before, each)


def _together(earlier: StageTime, later: StageTime) -> StageTime:
    return StageTime(
        stage=earlier.stage,
        num_micro_batches=earlier.num_micro_batches + later.num_micro_batches,
        start_unix_ns=min(earlier.start_unix_ns, later.start_unix_ns),
        end_unix_ns=max(earlier.end_unix_ns, later.end_unix_ns),
        compute_s=earlier.compute_s + later.compute_s,
        turn_wait_s=earlier.turn_wait_s + later.turn_wait_s,
        bubble_s=earlier.bubble_s + later.bubble_s,
        hop_s=earlier.hop_s + later.hop_s,
        hop_bytes=earlier.hop_bytes + later.hop_bytes,
    )


def stage_time(stage: int, micros: list[MicroTime]) -> StageTime:
    """What the stage did for a step of these micro-batches, at least one."""
    return StageTime(
        stage=stage,
        num_micro_batches=len(micros),
        start_unix_ns=int(min(micro.start_unix_s for micro in micros) * 1e9),
        end_unix_ns=int(max(micro.end_unix_s for micro in micros) * 1e9),
        compute_s=sum(micro.compute_s for micro in micros),
        turn_wait_s=sum(micro.turn_wait_s for micro in micros),
        bubble_s=sum(micro.bubble_s for micro in micros),
        hop_s=sum(micro.hop_s for micro in micros),
        hop_bytes=int(sum(micro.hop_bytes for micro in micros)),
    )
