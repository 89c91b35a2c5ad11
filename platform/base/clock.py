"""Time as a dependency, so that logic can be tested and replayed."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary start, never going back."""

    def now_s(self) -> float: ...


class SystemClock:
    """CLOCK_MONOTONIC: the same for all processes of a node."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """Moves only when told."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Moves forward; raises ValueError for a negative duration."""
        if duration_s < 0:
            raise ValueError(f"a clock does not go back: {duration_s}")
        self._now_s += duration_s
