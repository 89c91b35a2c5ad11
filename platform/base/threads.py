"""Threads as Linux sees them: their names, and how soon one that wakes gets a core while others compute on all of them.

Linux lets a thread ask for short slices of time (6.12 and later; earlier ones ignore it). It does not get more time for
that, but need not wait until whoever computes has used up a slice of its own, at each of the processes that a token
passes. Imports the standard library only: HAProxy's wrapper loads this file by its path.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path

_MAX_NAME_CHARS = 15
#: The shortest that Linux allows.
_PROMPT_SLICE_NS = 100_000
#: Leaves it to Linux.
_DEFAULT_SLICE_NS = 0
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
#: Threads of the native kernels name themselves so (kernels/native/src/threads.cpp).
_COMPUTING_NAME = "remora-team\n"


class _Attributes(ctypes.Structure):
    """Linux's struct sched_attr, first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def show_thread_name(name: str) -> None:
    """Gives the calling thread this name in `top -H` and profilers, cut to what Linux keeps: Python's own names stay
    inside Python. Does nothing where there is no /proc."""
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:_MAX_NAME_CHARS])


def wake_promptly() -> None:
    """Asks for short slices for all threads of this process but those that compute, and for those that they start. The
    calling thread is shown as the event loop."""
    show_thread_name("event loop")
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                if (task / "comm").read_text() != _COMPUTING_NAME:
                    _set_slice(int(task.name), _PROMPT_SLICE_NS)


def compute_long() -> None:
    """Takes that back for the calling thread: it computes."""
    with suppress(OSError):
        _set_slice(threading.get_native_id(), _DEFAULT_SLICE_NS)


def _set_slice(thread_id: int, slice_ns: int) -> None:
    """Does nothing for a thread of another policy than the ordinary one, or where Linux refuses."""
    if _SET_ATTRIBUTES is None or os.sched_getscheduler(thread_id) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, thread_id)
    attributes = _Attributes(size=ctypes.sizeof(_Attributes), policy=os.SCHED_OTHER, nice=nice, runtime=slice_ns)
    ctypes.CDLL(None).syscall(_SET_ATTRIBUTES, thread_id, ctypes.byref(attributes), 0)
