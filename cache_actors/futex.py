"""Sleeping on a 32-bit word of shared memory until another process wakes us (futex(2)), without spinning."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from typing import Final

_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_SYSCALL_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Futex:
    """One aligned word of a shared mapping. The mapping cannot be closed before `release`."""

    def __init__(self, mapping: mmap.mmap, offset: int) -> None:
        if offset % 4:
            raise ValueError(f"a futex word is aligned to 4 bytes, not at {offset}")
        machine = os.uname().machine
        if machine not in _SYSCALL_NUMBERS:
            raise OSError(errno.ENOSYS, f"no futex system call number known for {machine}")
        self._syscall_number = _SYSCALL_NUMBERS[machine]
        self._word: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(mapping, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))

    @property
    def value(self) -> int:
        assert self._word is not None
        return self._word.value

    def wait(self, value: int, timeout_s: float) -> None:
        """Sleeps while the word holds `value`, at most `timeout_s`; may also return early. Releases the GIL."""
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        result = _libc().syscall(
            self._syscall_number, self._address, _FUTEX_WAIT, ctypes.c_uint32(value), ctypes.byref(timeout), None, 0
        )
        if result < 0 and (error := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(error, os.strerror(error))

    def advance_and_wake(self) -> None:
        """Changes the word, so that a wait that is about to begin returns, and wakes its sleeper.

        The caller holds the lock under which all writers of the word write.
        """
        assert self._word is not None
        self._word.value = (self._word.value + 1) & 0xFFFFFFFF
        self.wake()

    def wake(self) -> None:
        """Wakes the sleeper, if there is one, without a change of the word: it looks at whatever else it waits for."""
        _libc().syscall(self._syscall_number, self._address, _FUTEX_WAKE, 1, None, None, 0)

    def release(self) -> None:
        self._word = None
