"""The journal of a pool as bytes: framed commands, checked when they are read back.

    frame   magic 2 | length 4 | CRC-32 4 | record number 8 | payload: msgpack [command, now_s]

The CRC covers number and payload. Record numbers count 1, 2, 3, ... over the life of a pool, across files; a snapshot
is kept with the number of the last record in it. A crash can tear the last record: it was never answered and is
dropped. A bad record with a good one behind it is damage, and the journal cannot be used.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import msgspec

from remora.namespaces.commands import AnyCommand
from remora.platform.base.errors import JournalError

_MAGIC = b"\xa7\x4a"
_HEAD = struct.Struct("<2sIIQ")
_NUMBER = struct.Struct("<Q")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[AnyCommand, float])


class JournalRecord(NamedTuple):
    record_no: int
    command: AnyCommand
    now_s: float


class JournalContents(NamedTuple):
    """What a journal holds. Bytes from `valid_bytes` on are a torn tail: cut them off before appending."""

    records: tuple[JournalRecord, ...]
    valid_bytes: int
    torn_bytes: int


def encode_record(record_no: int, command: AnyCommand, now_s: float) -> bytes:
    """One frame, ready to append."""
    payload = _ENCODER.encode((command, now_s))
    crc = zlib.crc32(payload, zlib.crc32(_NUMBER.pack(record_no)))
    return _HEAD.pack(_MAGIC, len(payload), crc, record_no) + payload


def read_journal(data: bytes, *, first_record_no: int = 1) -> JournalContents:
    """All records of a journal that starts with number `first_record_no`.

    Raises JournalError when a record is damaged but a good one follows it, when a number is missing, or when a good
    record cannot be understood.
    """
    records: list[JournalRecord] = []
    offset = 0
    expected = first_record_no
    while offset < len(data):
        frame = _frame_at(data, offset)
        if frame is None:
            follower = _next_frame(data, offset + 1)
            if follower is not None:
                raise JournalError(
                    f"the journal is damaged at byte {offset}: record {expected} cannot be read, but a later record "
                    f"at byte {follower} can"
                )
            break
        record_no, payload = frame
        if record_no != expected:
            raise JournalError(f"the journal has record {record_no} at byte {offset}, where {expected} belongs")
        try:
            command, now_s = _DECODER.decode(payload)
        except msgspec.MsgspecError as error:
            raise JournalError(f"record {record_no} of the journal cannot be understood: {error}") from error
        records.append(JournalRecord(record_no, command, now_s))
        offset += _HEAD.size + len(payload)
        expected += 1
    return JournalContents(tuple(records), offset, len(data) - offset)


def _frame_at(data: bytes, offset: int) -> tuple[int, bytes] | None:
    """Number and payload of an undamaged frame that starts here."""
    if offset + _HEAD.size > len(data):
        return None
    magic, length, crc, record_no = _HEAD.unpack_from(data, offset)
    start = offset + _HEAD.size
    if magic != _MAGIC or start + length > len(data):
        return None
    payload = data[start : start + length]
    if zlib.crc32(payload, zlib.crc32(_NUMBER.pack(record_no))) != crc:
        return None
    return record_no, payload


def _next_frame(data: bytes, offset: int) -> int | None:
    """Where the next undamaged frame starts, if there is one."""
    while (offset := data.find(_MAGIC, offset)) >= 0:
        if _frame_at(data, offset) is not None:
            return offset
        offset += 1
    return None
