"""One line for each step of a start, with the seconds since the beginning."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Prints `[  3.2 s] text` lines; whole lines only, so that they can be piped and logged."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._started_s = time.monotonic()

    def say(self, text: str) -> None:
        """Prints one step."""
        self._stream.write(f"[{time.monotonic() - self._started_s:5.1f} s] {text}\n")
        self._stream.flush()


def size_text(num_bytes: float) -> str:
    """A size for people: "512 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if num_bytes == int(num_bytes) else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
