"""Packed weights that the processes of a node use together, one copy in shared memory.

    index   <directory>/<cluster>@<key>.weights: who has them, a few hundred bytes on disk, under an flock
    memory  a sealed file without a name (memfd): each user holds a descriptor, others open it through /proc

The first process that wants weights makes them while it holds the index; the others wait for it, and map what is there.
Sealed memory cannot be written any more by anybody, nor change its size. Having no name, it is gone with its last user,
however that one ends; an index without living users is as good as none. Only processes of the same user get at either.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from remora.cache_actors.process_watch import boot_id, process_identity, start_time_ticks
from remora.kernels.native.packed_weights import PackedManifest, PackedWeights
from remora.kernels.native.weight_memory import WeightMemory, whole_pages
from remora.namespaces.commands import ProcessIdentity
from remora.platform.base.errors import IntegrityError

logger = logging.getLogger(__name__)

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_MAX_INDEX_BYTES: Final = 16 * 1024 * 1024


class _User(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds the memory as this descriptor."""

    process: ProcessIdentity
    fd: int

    def is_alive(self) -> bool:
        process = self.process
        return process.boot_id == boot_id() and start_time_ticks(process.pid) == process.start_time_ticks


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    manifest: PackedManifest
    users: tuple[_User, ...]


class Draft(NamedTuple):
    """Memory that is to be filled; nobody else sees it yet."""

    memory: WeightMemory
    fd: int


class WeightIndex:
    """One set of weights, held exclusively (WeightShare.locked)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def find(self) -> PackedWeights | None:
        """What a living process has, mapped; this one is then a user as well."""
        index = self._read()
        if index is None:
            return None
        for user in index.users:
            found = _open_memory(user, index.manifest)
            if found is None:
                continue
            memory, fd = found
            self._join(index.manifest, index.users, fd)
            return PackedWeights(index.manifest, memory)
        return None

    def draft(self, max_bytes: int) -> Draft:
        """New memory, empty. Raises OSError where the system has none."""
        fd = os.memfd_create("remora-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, whole_pages(max_bytes))
            return Draft(WeightMemory(max_bytes, fd=fd), fd)
        except BaseException:
            os.close(fd)
            raise

    def publish(self, draft: Draft, manifest: PackedManifest) -> None:
        """Seals what was filled in, so that it is read-only here too, and shows it to others. Raises OSError."""
        memory, fd = draft
        os.ftruncate(fd, whole_pages(manifest.num_bytes))
        # A mapping that may be made writable again, as one of a writable descriptor, is in the way of the seal.
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory.make_read_only(read_only)
            if not memory.collapse(manifest.num_bytes):
                logger.warning("weights lie on small pages, which makes steps slower: no free huge pages")
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        finally:
            os.close(read_only)
        self._join(manifest, (), fd)

    def _join(self, manifest: PackedManifest, users: tuple[_User, ...], fd: int) -> None:
        """The descriptor stays open for as long as this process lives: others come through it."""
        living = tuple(user for user in users if user.is_alive())
        me = _User(process=process_identity(), fd=fd)
        data = msgspec.json.encode(_Index(manifest=manifest, users=(*living, me)))
        # Whoever reads a file that was cut off here takes it for empty.
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def _read(self) -> _Index | None:
        data = os.pread(self._fd, _MAX_INDEX_BYTES, 0)
        try:
            return msgspec.json.decode(data, type=_Index)
        except msgspec.DecodeError:
            return None


class WeightShare:
    """The shared weights of one cluster on this node."""

    def __init__(self, directory: Path, cluster_name: str) -> None:
        """`directory`: of this node, made when it is missing."""
        self._directory = directory
        self._cluster_name = cluster_name

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[WeightIndex]:
        """Waits until nobody else makes or looks for these weights. Raises OSError, IntegrityError for an index that is
        not this user's own file."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / f"{self._cluster_name}@{key}.weights"
        fd = self._open_locked(path)
        try:
            yield WeightIndex(fd)
        finally:
            os.close(fd)

    def _open_locked(self, path: Path) -> int:
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                    raise IntegrityError(f"{path} is not a file of this user alone: remove it")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    logger.info("waiting for the process that packs these weights (%s)", path)
                    fcntl.flock(fd, fcntl.LOCK_EX)
                # Somebody may have removed it meanwhile: who locks a removed file locks nothing.
                if os.fstat(fd).st_nlink:
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _open_memory(user: _User, manifest: PackedManifest) -> tuple[WeightMemory, int] | None:
    """Of a living process of this user: sealed memory of the right size, or nothing."""
    if not user.is_alive():
        return None
    num_bytes = whole_pages(manifest.num_bytes)
    try:
        fd = os.open(f"/proc/{user.process.pid}/fd/{user.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        logger.info("the weights of process %d cannot be mapped: %s", user.process.pid, error)
        return None
    try:
        status = os.fstat(fd)
        is_right = status.st_uid == os.getuid() and status.st_size == num_bytes
        if is_right and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS:
            memory = WeightMemory(num_bytes, fd=fd, writable=False)
            memory.collapse(num_bytes)
            return memory, fd
    except OSError as error:  # not a memory file at all: the number is another file's by now
        logger.info("the weights of process %d cannot be mapped: %s", user.process.pid, error)
    os.close(fd)
    return None
