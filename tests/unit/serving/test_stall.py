"""StallWatch: work without steps is noticed, idleness is not."""

from __future__ import annotations

import pytest

from remora.deployments.engine.base import EngineStats, HistogramStats
from remora.deployments.stall import StallWatch
from remora.platform.base.clock import ManualClock
from remora.platform.base.errors import Unavailable

NOTHING = HistogramStats(bounds=(), counts=(0,), sum=0.0)


def stats(*, num_running: int, num_steps: int) -> EngineStats:
    return EngineStats(
        num_running=num_running, num_waiting=0, num_parked=0, load_tokens=0, num_requests=0, num_steps=num_steps,
        num_failed_steps=0, num_preemptions=0, num_prompt_tokens=0, num_cached_tokens=0, num_copied_tokens=0,
        num_converted_tokens=0,
        num_damaged_blocks=0, num_output_tokens=0, num_published_blocks=0, num_finished={}, is_fenced=False,
        step_s=NOTHING, step_overhead_s=NOTHING, turn_s=0.0, turn_wait_s=NOTHING, time_to_first_token_s=NOTHING,
        inter_token_s=NOTHING,
    )  # fmt: skip


def test_an_engine_with_work_and_no_steps_is_unhealthy_after_the_limit() -> None:
    clock = ManualClock()
    watch = StallWatch(max_stall_s=10, now_s=clock.now_s)
    for _ in range(12):
        watch.check(stats(num_running=1, num_steps=5))
        clock.advance(1)
    clock.advance(1)
    with pytest.raises(Unavailable, match="made no step"):
        watch.check(stats(num_running=1, num_steps=5))
    watch.check(stats(num_running=1, num_steps=6))


def test_an_idle_engine_is_healthy_for_ever() -> None:
    clock = ManualClock()
    watch = StallWatch(max_stall_s=10, now_s=clock.now_s)
    for _ in range(5):
        watch.check(stats(num_running=0, num_steps=5))
        clock.advance(1000)
    watch.check(stats(num_running=1, num_steps=5))
