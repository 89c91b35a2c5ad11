"""What an engine counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from remora.deployments.engine.base import EngineStats, Histogram
from remora.deployments.pipeline.base import StageTime
from remora.deployments.pipeline.stage_counters import add_to

_STEP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_WAIT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


class EngineCounters:
    """Written by the engine's thread; a reader elsewhere sees each number whole, if not all of the same moment."""

    def __init__(self) -> None:
        self.load_tokens = 0
        self.num_requests = 0
        self.num_steps = 0
        self.num_failed_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_copied_tokens = 0
        self.num_converted_tokens = 0
        self.num_damaged_blocks = 0
        self.num_output_tokens = 0
        self.turn_s = 0.0
        self.num_finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.step_s = Histogram(_STEP_BOUNDS_S)
        self.step_overhead_s = Histogram(_STEP_BOUNDS_S)
        self.turn_wait_s = Histogram(_STEP_BOUNDS_S)
        self.time_to_first_token_s = Histogram(_WAIT_BOUNDS_S)
        self.inter_token_s = Histogram(_WAIT_BOUNDS_S)
        self._stages: dict[int, StageTime] = {}

    def add_stages(self, stage_times: Iterable[StageTime]) -> None:
        """What the stages of a pipeline did for one step."""
        add_to(self._stages, stage_times)

    def stats(
        self, *, num_running: int, num_waiting: int, num_parked: int, num_published_blocks: int, is_fenced: bool
    ) -> EngineStats:
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_parked=num_parked,
            load_tokens=self.load_tokens,
            num_requests=self.num_requests,
            num_steps=self.num_steps,
            num_failed_steps=self.num_failed_steps,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_copied_tokens=self.num_copied_tokens,
            num_converted_tokens=self.num_converted_tokens,
            num_damaged_blocks=self.num_damaged_blocks,
            num_output_tokens=self.num_output_tokens,
            num_published_blocks=num_published_blocks,
            num_finished=dict(self.num_finished),
            is_fenced=is_fenced,
            turn_s=self.turn_s,
            step_s=self.step_s.stats(),
            step_overhead_s=self.step_overhead_s.stats(),
            turn_wait_s=self.turn_wait_s.stats(),
            time_to_first_token_s=self.time_to_first_token_s.stats(),
            inter_token_s=self.inter_token_s.stats(),
            stages=tuple(self._stages[stage] for stage in sorted(self._stages)),
        )
