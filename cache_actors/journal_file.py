"""The journal of a pool on its file system: a snapshot, and behind it the commands since, framed by namespaces/journal.

    magic 8 | last record number in the snapshot 8 | snapshot bytes 8 | CRC-32 4 | snapshot | frames ... | zeros

The file is allocated ahead, so that appending does not run out of space half-way. When the commands outgrow the
snapshot, a new file with a new snapshot takes the old one's name. What was appended is in the kernel's page cache and
so survives the death of the process; it need not survive the machine, because the arena does not either.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from remora.namespaces.commands import AnyCommand
from remora.namespaces.journal import JournalRecord, encode_record, read_journal
from remora.platform.base.errors import JournalError, Unavailable

logger = logging.getLogger(__name__)

_MAGIC: Final = b"REMORAJ1"
_HEAD: Final = struct.Struct("<8sQQ")
_CRC: Final = struct.Struct("<I")
_SNAPSHOT_OFFSET: Final = _HEAD.size + _CRC.size
#: Commands may take this many bytes, or twice those of the snapshot, before the next snapshot.
_MIN_COMMANDS_BYTES: Final = 1024 * 1024


class JournalLog(NamedTuple):
    """What a journal file holds."""

    snapshot: bytes
    records: tuple[JournalRecord, ...]
    last_record_no: int


class JournalFile:
    """An open journal with one writer. Appends are whole or not at all."""

    def __init__(self, path: Path, snapshot: bytes, last_record_no: int) -> None:
        """Starts a new journal at `path`, replacing the one there in one step. Raises JournalError without room."""
        self.path: Final = path
        self._fd = -1
        self._last_record_no = last_record_no
        #: Offsets: where commands begin, where the next one goes, and up to where the file is allocated.
        self._commands_start = self._end = self._capacity = 0
        self._commands_bytes = 0
        self._start_over(snapshot, last_record_no)

    @property
    def last_record_no(self) -> int:
        return self._last_record_no

    @property
    def num_bytes(self) -> int:
        """Bytes of snapshot and commands."""
        return self._end

    @property
    def is_due(self) -> bool:
        """Whether a new snapshot would pay."""
        return self._end - self._commands_start > self._commands_bytes

    def append(self, commands: Sequence[AnyCommand], now_s: float) -> int:
        """Adds commands and returns the number of the last one.

        Raises Unavailable, with nothing added, when there is no room.
        """
        frames = b"".join(
            encode_record(number, command, now_s) for number, command in enumerate(commands, self._last_record_no + 1)
        )
        try:
            if self._end + len(frames) > self._capacity:
                grown = self._end + 2 * len(frames)
                os.posix_fallocate(self._fd, self._capacity, grown - self._capacity)
                self._capacity = grown
            _write_all(self._fd, frames, self._end)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
                self._capacity = self._end
            raise Unavailable(f"{self.path}: cannot be written: {error.strerror}") from None
        self._end += len(frames)
        self._last_record_no += len(commands)
        return self._last_record_no

    def compact(self, snapshot: bytes) -> None:
        """Replaces the file by one that starts with this snapshot of the state after the last record.

        Raises JournalError without room; the old file then stays in use.
        """
        self._start_over(snapshot, self._last_record_no)

    def read(self) -> JournalLog:
        """What the file holds now."""
        return read_journal_file(self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _start_over(self, snapshot: bytes, last_record_no: int) -> None:
        commands_bytes = max(_MIN_COMMANDS_BYTES, 2 * len(snapshot))
        start = _SNAPSHOT_OFFSET + len(snapshot)
        capacity = start + 2 * commands_bytes
        temporary = self.path.with_name(f"{self.path.name}.new")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, capacity)
            head = _HEAD.pack(_MAGIC, last_record_no, len(snapshot))
            _write_all(fd, head + _CRC.pack(zlib.crc32(snapshot, zlib.crc32(head))) + snapshot, 0)
            os.rename(temporary, self.path)
        except OSError as error:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise JournalError(f"{self.path}: cannot allocate {capacity} bytes: {error.strerror}") from None
        self.close()
        self._fd = fd
        self._commands_start = self._end = start
        self._commands_bytes = commands_bytes
        self._capacity = capacity
        self._last_record_no = last_record_no


def read_journal_file(path: Path) -> JournalLog:
    """Reads a journal back. A torn last record was never answered; it is dropped with a log line.

    Raises JournalError for a file that is missing or damaged anywhere else.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) < _SNAPSHOT_OFFSET or data[: len(_MAGIC)] != _MAGIC:
        raise JournalError(f"{path}: not a journal of this version")
    _, last_record_no, num_bytes = _HEAD.unpack_from(data)
    start = _SNAPSHOT_OFFSET + num_bytes
    snapshot = data[_SNAPSHOT_OFFSET:start]
    (crc,) = _CRC.unpack_from(data, _HEAD.size)
    if start > len(data) or zlib.crc32(snapshot, zlib.crc32(data[: _HEAD.size])) != crc:
        raise JournalError(f"{path}: the snapshot is damaged")
    # Frames do not end in so many zeros by themselves that cutting the allocated rest off could matter: the reader
    # takes a shortened last frame for a torn one, so as many zeros as a frame may end in are kept.
    frames = data[start:].rstrip(b"\0")
    frames = data[start : start + len(frames) + 64]
    contents = read_journal(frames, first_record_no=last_record_no + 1)
    if contents.torn_bytes and frames[contents.valid_bytes :].strip(b"\0"):
        logger.warning("%s: dropped a torn last record after record %d", path, last_record_no + len(contents.records))
    return JournalLog(snapshot, contents.records, last_record_no + len(contents.records))


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
