"""Memory that packed weights lie in: private, or a file in memory that several processes map.

Steps of few rows spend their time reading weights: a third longer on pages of 4 KiB. Linux gives private memory
huge pages when asked (MADV_HUGEPAGE); a file in memory gets them from `collapse`, since Linux 6.1 and whatever the
administrator has set for shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def whole_pages(num_bytes: int) -> int:
    """Rounded up to whole huge pages."""
    return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


class WeightMemory:
    """A mapping of whole huge pages at `address`; unmapped when nobody holds the object any more."""

    def __init__(self, num_bytes: int, *, fd: int = -1, writable: bool = True) -> None:
        """`fd`: of a file of at least that size, rounded up; -1: private memory. Raises OSError.

        The descriptor may be closed afterwards.
        """
        self.num_bytes: Final = whole_pages(num_bytes)
        self.is_shared: Final = fd >= 0
        # A larger range first: mmap knows nothing of huge pages, and a part of it begins on one.
        reserved_bytes = self.num_bytes + HUGE_PAGE_BYTES
        start = _map(None, reserved_bytes, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._finalizer = weakref.finalize(self, _libc().munmap, start, reserved_bytes)
        self.address: Final = whole_pages(start)
        protection = _PROT_READ | (_PROT_WRITE if writable else 0)
        flags = _MAP_SHARED if self.is_shared else _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        _map(self.address, self.num_bytes, protection, flags | _MAP_FIXED, fd)
        if not self.is_shared:
            _libc().madvise(self.address, self.num_bytes, _MADV_HUGEPAGE)

    def bytes_view(self, num_bytes: int) -> NDArray[np.uint8]:
        """The first bytes, for as long as this object lives; to be read only where the memory is."""
        array: Any = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        return np.frombuffer(array, np.uint8)

    def allocate(self, num_bytes: int) -> None:
        """Takes huge pages for the first bytes before they are written, where shared memory can have some: filling
        small pages first and merging them then takes several times as long."""
        if self.is_shared:
            # Linux merges no range without any page.
            self.bytes_view(whole_pages(num_bytes))[::HUGE_PAGE_BYTES] = 0
            self.collapse(num_bytes)

    def make_read_only(self, fd: int) -> None:
        """Maps the file of shared memory again, at the same address, so that nobody here can write to it."""
        _map(self.address, self.num_bytes, _PROT_READ, _MAP_SHARED | _MAP_FIXED, fd)

    def collapse(self, num_bytes: int) -> bool:
        """Gives the first bytes of shared memory huge pages, for every process that maps them. False where Linux cannot
        or finds no free ones."""
        return bool(_libc().madvise(self.address, whole_pages(num_bytes), _MADV_COLLAPSE) == 0)

    def huge_page_bytes(self) -> int:
        """Bytes of the mapping that this process sees as huge pages."""
        smaps = Path("/proc/self/smaps").read_text()
        found = re.search(rf"^{self.address:08x}-.*?^VmFlags", smaps, re.MULTILINE | re.DOTALL)
        if found is None:
            return 0
        return 1024 * sum(int(size) for size in re.findall(r"(?:AnonHugePages|ShmemPmdMapped): +(\d+)", found[0]))


def _map(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc().mmap(address, num_bytes, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return found


@functools.cache
def shared_memory_is_fast() -> bool:
    """Whether files in memory can get huge pages here (tried once)."""
    try:
        fd = os.memfd_create("remora-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, HUGE_PAGE_BYTES)
            memory = WeightMemory(HUGE_PAGE_BYTES, fd=fd)
            memory.bytes_view(1)[:] = 0  # Linux merges no range without any page
            return memory.collapse(HUGE_PAGE_BYTES)
        finally:
            os.close(fd)
    except OSError:
        return False
