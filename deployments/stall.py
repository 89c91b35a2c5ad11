"""Notices an engine that has work and makes no steps: a hung kernel, a device that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

from remora.deployments.engine.base import EngineStats
from remora.platform.base.errors import Unavailable

#: Longer than any step of a served model takes, its turn among other replicas of the device included.
MAX_STALL_S = 60.0


class StallWatch:
    """Asked now and then with the engine's figures."""

    def __init__(self, *, max_stall_s: float = MAX_STALL_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_stall_s = max_stall_s
        self._now_s = now_s
        self._num_steps = -1
        self._stuck_since_s: float | None = None

    def check(self, stats: EngineStats) -> None:
        """Raises Unavailable when sequences hold blocks and no step was made for `max_stall_s`."""
        moved = stats.num_steps != self._num_steps
        self._num_steps = stats.num_steps
        if moved or not stats.num_running:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = self._now_s()
        elif self._now_s() - self._stuck_since_s > self._max_stall_s:
            raise Unavailable(
                f"the engine has {stats.num_running} sequences and made no step for {self._max_stall_s:g} s"
            )
