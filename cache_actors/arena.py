"""The one byte range of a CPU device that holds KV: a file that its pool actor owns and replicas map.

    create ─► file under a temporary name: allocated, header written, locked ─► renamed to its name
    adopt  ─► the same file again, after its owner died: same boot, cluster, sizes; lock taken over
    open   ─► another process's mapping, for reading and writing blocks it was granted

One owner at a time: it holds an exclusive flock on the file, which the kernel drops when the process ends. Mappings are
not inherited by forked children (MADV_DONTFORK), so that a process that is gone has no heir that still writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import time
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.arena_header import HEADER_BYTES, ArenaHeader, ArenaIdentity
from remora.cache_actors.memory_budget import available_memory_bytes
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import ArenaError

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
#: Smaller arenas (tests) do not spend a huge page on their header.
_MIN_HUGE_ARENA_BYTES: Final = 16 * HUGE_PAGE_BYTES
_SMALL_DATA_OFFSET: Final = 64 * 1024


def data_offset(data_bytes: int) -> int:
    """Where data begins in the file: on a huge page if the arena is large enough to gain from it, else on a page."""
    return HUGE_PAGE_BYTES if data_bytes >= _MIN_HUGE_ARENA_BYTES else _SMALL_DATA_OFFSET


def file_bytes(data_bytes: int) -> int:
    """Size of the file of an arena."""
    return data_offset(data_bytes) + data_bytes


class MappedArena(Protocol):
    """What pools and replicas use, whatever the device (here, and cuda_arena.py)."""

    path: Path
    #: [data_bytes] uint8 in the memory of the device.
    data: Any

    @property
    def header(self) -> ArenaHeader: ...

    def zero(self, offset: int, num_bytes: int) -> None: ...

    def copy(self, source: int, target: int, num_bytes: int) -> None: ...

    def free_bytes(self) -> int:
        """Memory of the device that nobody has yet."""
        ...

    def close(self) -> None: ...

    def unlink(self) -> None: ...


class Opened(NamedTuple):
    """An arena and how it came about; `reason` is a phrase for the log ("no arena was there")."""

    arena: Arena
    outcome: Literal["created", "adopted", "replaced"]
    reason: str


class Arena:
    """A mapped arena. `data` is [data_bytes] uint8, page-aligned, shared with every process that maps the file."""

    def __init__(self, path: Path, fd: int, *, owner: bool, writable: bool = True) -> None:
        """Maps an open file. Raises ArenaError when it is no whole arena. Takes the descriptor over."""
        self.path = path
        self.is_owner: Final = owner
        self._fd = fd
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            os.close(fd)
            raise ArenaError(f"{path}: too short for an arena: {size} bytes")
        self._mapping = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self._header: ArenaHeader | None = None
        try:
            self._header = ArenaHeader(memoryview(self._mapping))
            data_bytes = self.header.identity.data_bytes
            if self.header.data_offset + data_bytes != size:
                raise ArenaError(f"{path}: {size} bytes, but its header says {self.header.data_offset + data_bytes}")
        except ArenaError as error:
            self.close()
            raise ArenaError(f"{path}: {error}") from None
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # kernels without huge pages in shared memory
                self._mapping.madvise(advice)
        self.data: Any = np.frombuffer(self._mapping, dtype=np.uint8, count=data_bytes, offset=self.header.data_offset)
        if not owner:
            os.close(fd)
            self._fd = -1

    @property
    def header(self) -> ArenaHeader:
        if self._header is None:
            raise ArenaError(f"{self.path} is closed")
        return self._header

    @staticmethod
    def create(path: Path, identity: ArenaIdentity) -> Arena:
        """Makes a zeroed, fully allocated arena of a new incarnation, replacing a file of that name.

        Raises ArenaError when memory for it cannot be allocated. The caller has checked that nobody owns the old file.
        """
        temporary = path.with_name(f"{path.name}.new")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A sparse file would die by SIGBUS at the first write that finds no memory; this fails here and now.
            os.posix_fallocate(fd, 0, file_bytes(identity.data_bytes))
            with mmap.mmap(fd, HEADER_BYTES) as mapping:
                header = ArenaHeader.write(
                    memoryview(mapping), identity, data_offset(identity.data_bytes), secrets.randbits(63) + 1
                )
                header.release()
            os.rename(temporary, path)
        except OSError as error:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise ArenaError(
                f"{path}: cannot allocate {file_bytes(identity.data_bytes)} bytes: {error.strerror}; raise the size of "
                f"{path.parent} or lower arena_bytes"
            ) from None
        return Arena(path, fd, owner=True)

    @staticmethod
    def adopt(path: Path, identity: ArenaIdentity, *, lock_timeout_s: float = 10.0) -> Arena:
        """Takes over an arena whose owner is gone. Raises FileNotFoundError, or ArenaError saying what differs.

        Waits for a previous owner that is still dying; one that lives longer than `lock_timeout_s` is an ArenaError.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _take_ownership(fd, path, lock_timeout_s)
        except ArenaError:
            os.close(fd)
            raise
        arena = Arena(path, fd, owner=True)
        found = arena.header.identity
        different = [name for name in identity.__struct_fields__ if getattr(found, name) != getattr(identity, name)]
        if arena.header.incarnation == 0:
            different.append("incarnation (given up)")
        if different:
            arena.close()
            raise ArenaError(f"{path}: cannot be adopted, it differs in: {', '.join(different)}")
        return arena

    @staticmethod
    def open(path: Path, *, writable: bool = True) -> Arena:
        """Maps the arena of a running pool, for reading only unless `writable`. Raises ArenaError."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"{path}: cannot be opened: {error.strerror}") from None
        return Arena(path, fd, owner=False, writable=writable)

    @staticmethod
    def adopt_or_create(path: Path, identity: ArenaIdentity, *, lock_timeout_s: float = 10.0) -> Opened:
        """The pool's way in: adopts what fits, replaces what does not, creates what is missing.

        Raises ArenaError when another living process owns the arena, or when memory cannot be allocated.
        """
        try:
            arena = Arena.adopt(path, identity, lock_timeout_s=lock_timeout_s)
        except FileNotFoundError:
            return Opened(Arena.create(path, identity), "created", "no arena was there")
        except OwnedElsewhere:
            raise
        except ArenaError as error:
            condemn(path)
            return Opened(Arena.create(path, identity), "replaced", str(error))
        return Opened(arena, "adopted", "same boot, cluster and sizes")

    def zero(self, offset: int, num_bytes: int) -> None:
        """Overwrites a range of the data with zeros. Raises ValueError outside the data."""
        if not 0 <= offset <= offset + num_bytes <= len(self.data):
            raise ValueError(f"{offset} .. {offset + num_bytes} is outside the arena's {len(self.data)} bytes")
        self.data[offset : offset + num_bytes] = 0

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copies a range of the data to another that does not touch it. Raises ValueError outside the data."""
        if min(source, target) < 0 or max(source, target) + num_bytes > len(self.data):
            raise ValueError(f"{source} or {target} .. +{num_bytes} is outside the arena's {len(self.data)} bytes")
        self.data[target : target + num_bytes] = self.data[source : source + num_bytes]

    def free_bytes(self) -> int:
        return max(0, available_memory_bytes())

    def close(self) -> None:
        """Unmaps (as soon as no array refers to `data`) and gives ownership up. The file stays."""
        if self._header is not None:
            self._header.release()
            self._header = None
        self.__dict__.pop("data", None)
        with contextlib.suppress(BufferError):  # arrays still refer to it: unmapped when the last is gone
            self._mapping.close()
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def unlink(self) -> None:
        """Removes the file; mappings of other processes stay valid, but the incarnation word tells them to stop."""
        self.header.incarnation = 0
        self.path.unlink(missing_ok=True)


class ArenaView:
    """An arena as one model sees it: block i is at byte i * block_bytes. Satisfies kernels.base.KVMemory."""

    def __init__(self, arena: MappedArena, geometry: KVGeometry) -> None:
        self._data: NDArray[np.uint8] = arena.data
        self._geometry = geometry

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry


class OwnedElsewhere(ArenaError):
    """Another living process owns the arena."""


def condemn(path: Path) -> None:
    """Tells every process that still maps the file to stop, if it is an arena at all. The file stays.

    The caller owns the arena, or knows that nobody does.
    """
    try:
        arena = Arena.open(path)
    except ArenaError:
        return
    arena.header.incarnation = 0
    arena.close()


def is_owned(path: Path) -> bool:
    """Whether a living process holds the arena. False for a missing file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _take_ownership(fd: int, path: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise OwnedElsewhere(f"{path}: another living pool actor owns this arena") from None
            time.sleep(0.02)
