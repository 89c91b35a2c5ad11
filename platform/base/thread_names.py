"""Names of threads as `top -H`, `ps -L` and profilers show them; Python's own names stay inside Python."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

_MAX_CHARS = 15


def show_thread_name(name: str) -> None:
    """Gives the calling thread this name, cut to what Linux keeps; does nothing where there is no /proc."""
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:_MAX_CHARS])
