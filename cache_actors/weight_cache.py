"""Packed weights on disk, so that the next start reads them instead of packing them again.

    <directory>/<key>.packed   magic · bytes of the description · description (JSON), to whole pages · the weights

A file appears whole, under a temporary name first, and every piece of it has a CRC-32. The files that were used longest
ago give way to new ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.memory_budget import free_bytes
from remora.kernels.native.packed_weights import PackedManifest

logger = logging.getLogger(__name__)

MiB = 1024 * 1024
_MAGIC: Final = b"RMPACK01"
_HEAD: Final = struct.Struct("<8sQ")
_PAGE_BYTES: Final = 4096
_PIECE_BYTES: Final = 16 * MiB
#: Left free on the disk.
_SPARE_BYTES: Final = 1024 * MiB
#: A file that was begun so long ago belongs to a process that is gone.
_ABANDONED_S: Final = 3600.0
_MAX_DESCRIPTION_BYTES: Final = 64 * MiB


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    manifest: PackedManifest
    #: CRC-32 of each _PIECE_BYTES of the weights.
    checksums: tuple[int, ...]


class CachedWeights(NamedTuple):
    """A file that is there; its contents are not checked yet."""

    path: Path
    manifest: PackedManifest
    checksums: tuple[int, ...]
    data_offset: int


class WeightCache:
    """Files of packed weights in one directory, together no larger than `max_bytes` (0: none are kept)."""

    def __init__(self, directory: Path, max_bytes: int, *, num_threads: int = 1) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._num_threads = num_threads

    def find(self, key: str) -> CachedWeights | None:
        """The file of this key, if it is one of this user's and whole; one that is not is removed."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                magic, num_bytes = _HEAD.unpack(file.read(_HEAD.size))
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                    raise ValueError("it belongs to somebody else")
                if magic != _MAGIC or num_bytes > _MAX_DESCRIPTION_BYTES:
                    raise ValueError("it is something else")
                description = msgspec.json.decode(file.read(num_bytes), type=_Description)
            offset = _padded(_HEAD.size + num_bytes)
            if description.key != key or status.st_size != offset + description.manifest.num_bytes:
                raise ValueError(f"it has {status.st_size} bytes, or weights of another key")
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error, msgspec.DecodeError) as error:
            self.discard(path, str(error))
            return None
        return CachedWeights(path, description.manifest, description.checksums, offset)

    def read(self, cached: CachedWeights, target: NDArray[np.uint8]) -> bool:
        """Reads the weights into `target`, on all threads. False when they are not those that were written; the file
        is then removed, and the contents of `target` mean nothing."""
        try:
            fd = os.open(cached.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.discard(cached.path, str(error))
            return False

        whole = memoryview(target.data)

        def check(number: int) -> bool:
            part = whole[number * _PIECE_BYTES : (number + 1) * _PIECE_BYTES]
            done = 0
            while done < len(part):
                count = os.preadv(fd, [part[done:]], cached.data_offset + number * _PIECE_BYTES + done)
                if count == 0:
                    return False
                done += count
            return zlib.crc32(part) == cached.checksums[number]

        try:
            num_pieces = -(-len(target) // _PIECE_BYTES)
            is_whole = len(cached.checksums) == num_pieces and all(self._on_threads(check, num_pieces))
        except OSError as error:
            logger.warning("%s cannot be read: %s", cached.path, error)
            is_whole = False
        finally:
            os.close(fd)
        if not is_whole:
            self.discard(cached.path, "its contents are not what was written")
        return is_whole

    def keep(self, key: str, manifest: PackedManifest, weights: NDArray[np.uint8]) -> bool:
        """Writes a file, and makes room for it. False, with a line in the log, where it cannot be."""
        num_bytes = len(weights)
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(num_bytes)
            if num_bytes > self._max_bytes or num_bytes + _SPARE_BYTES > free_bytes(self._directory):
                logger.info("packed weights of %d MiB are not kept: no room in %s", num_bytes // MiB, self._directory)
                return False
            num_pieces = -(-num_bytes // _PIECE_BYTES)
            whole = memoryview(weights.data)
            pieces = [whole[number * _PIECE_BYTES : (number + 1) * _PIECE_BYTES] for number in range(num_pieces)]
            checksums = tuple(map(zlib.crc32, pieces))
            description = msgspec.json.encode(_Description(key=key, manifest=manifest, checksums=checksums))
            head = _HEAD.pack(_MAGIC, len(description)) + description
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb", buffering=0) as file:
                file.write(head.ljust(_padded(len(head)), b"\0"))
                for piece in pieces:
                    file.write(piece)
                os.fsync(fd)
            partial.replace(path)
        except OSError as error:
            logger.warning("packed weights are not kept in %s: %s", self._directory, error)
            with contextlib.suppress(OSError):
                partial.unlink()
            return False
        return True

    def discard(self, path: Path, reason: str) -> None:
        logger.warning("removing %s: %s", path, reason)
        with contextlib.suppress(OSError):
            path.unlink()

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.packed"

    def _on_threads(self, call: Callable[[int], bool], count: int) -> list[bool]:
        with ThreadPoolExecutor(max(1, self._num_threads)) as executor:
            return list(executor.map(call, range(count)))

    def _make_room(self, num_bytes: int) -> None:
        """Removes what was used longest ago until so much more fits, and what was never finished."""
        for path in self._directory.glob("*.partial"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
        files = []
        for path in self._directory.glob("*.packed"):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total + num_bytes <= self._max_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
