"""Notices a replica that has had nothing to do for long."""

from __future__ import annotations

import time
from collections.abc import Callable


class IdleWatch:
    """Told of work, asked now and then."""

    def __init__(self, idle_timeout_s: float | None, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """None: there is no such thing as too long."""
        self._idle_timeout_s = idle_timeout_s
        self._now_s = now_s
        self._busy_s = now_s()

    def note_busy(self) -> None:
        """There is work now."""
        self._busy_s = self._now_s()

    def is_over(self) -> bool:
        """Whether there was none for the time-out."""
        return self._idle_timeout_s is not None and self._now_s() - self._busy_s >= self._idle_timeout_s
