"""Where the time from a process's start until it serves went."""

from __future__ import annotations

import os
import time

from remora.cache_actors.process_watch import start_time_ticks


class StartTimes:
    """Seconds by the name of what was done in them, in order. The first is everything before: the interpreter, imports,
    and what the process waited for before it was given its work."""

    def __init__(self, first: str) -> None:
        ticks = start_time_ticks(os.getpid())
        assert ticks is not None
        self._last_s = ticks / os.sysconf("SC_CLK_TCK")
        self.seconds: dict[str, float] = {}
        self.end(first)

    def end(self, name: str) -> None:
        """What was done since the last call is called that."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.seconds[name] = round(now_s - self._last_s, 3)
        self._last_s = now_s

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s after its process started ({parts})"
