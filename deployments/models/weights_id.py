"""The identity of weights: a hash of every byte of their files.

Sampling would be faster, but two models that differ in a few rows must never share KV. Files are hashed in parallel
pieces (about 1 GB/s a core), and the result is kept in the state directory for as long as the file does not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from remora.platform.base.errors import ModelError
from remora.platform.base.paths import default_state_dir

_PIECE_BYTES = 32 * 1024 * 1024


def files_hash(files: Iterable[Path], *, num_threads: int, cache_dir: Path | None = None) -> bytes:
    """16 bytes that change with any byte of the files' contents; their names and places do not matter.

    Raises ModelError for a file that cannot be read. `cache_dir`: default the user's state directory.
    """
    total = hashlib.blake2b(digest_size=16)
    for path in files:
        total.update(_file_hash(path, num_threads, (cache_dir or default_state_dir()) / "weights-ids"))
    return total.digest()


def _file_hash(path: Path, num_threads: int, cache_dir: Path) -> bytes:
    try:
        status = path.stat()
        key = f"{path.resolve()}\0{status.st_dev}\0{status.st_ino}\0{status.st_size}\0{status.st_mtime_ns}"
        kept = cache_dir / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        try:
            return bytes.fromhex(json.loads(kept.read_text())["hash"])
        except (OSError, ValueError, KeyError, TypeError):
            digest = _hash_contents(path, num_threads)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    _keep(kept, path, digest)
    return digest


def _hash_contents(path: Path, num_threads: int) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        total = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=32)
        if size == 0:
            return total.digest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:

            def piece(start: int) -> bytes:
                # hashlib lets go of the GIL for pieces of this size.
                with view[start : start + _PIECE_BYTES] as part:
                    return hashlib.blake2b(part, digest_size=32).digest()

            with ThreadPoolExecutor(max(1, num_threads)) as executor:
                for digest in executor.map(piece, range(0, size, _PIECE_BYTES)):
                    total.update(digest)
    return total.digest()


def _keep(kept: Path, path: Path, digest: bytes) -> None:
    """Writes the cache entry whole or not at all; without a writable directory the hash is computed at each start."""
    partial = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"file": str(path), "hash": digest.hex()}))
        partial.replace(kept)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
