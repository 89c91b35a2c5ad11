"""The first bytes of an arena file: who made it, where the data lies, and the words that fence leases.

    0      fixed part: magic, format, identity, data offset and size, CRC     written once, before the file has its name
    1024   incarnation word      0 = this arena is dead: no replica may emit a token any more
    1032   restarts word         times the pool actor came back to this arena
    1040   effects word          number of the last journal record whose effects on the data are done
    1048   effect step word      effects of the records behind it that are done
    4096   1024 lease generation words
    12288  end of the header; data starts at `data_offset`

Words are 64 bit, little-endian, aligned, and written only by the pool actor; replicas read them without a lock.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec

from remora.platform.base.errors import ArenaError

HEADER_BYTES: Final = 12288
MAX_LEASES: Final = 1024
_MAGIC: Final = b"REMORAKV"
_FORMAT: Final = 1
_INCARNATION_WORD: Final = 1024 // 8
_RESTARTS_WORD: Final = _INCARNATION_WORD + 1
_EFFECTS_WORD: Final = _INCARNATION_WORD + 2
_STEP_WORD: Final = _INCARNATION_WORD + 3
_LEASE_WORDS: Final = 4096 // 8
_HEAD: Final = struct.Struct("<8sIII")  # magic, format, bytes of the identity, CRC of the identity
_MAX_WORD: Final = (1 << 64) - 1


class ArenaIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for an arena to be adopted."""

    cluster_name: str
    device_name: str
    #: /proc/sys/kernel/random/boot_id; monotonic times and process start times are comparable within one boot only.
    boot_id: str
    data_bytes: int
    #: Digest of whatever else the pool's state depends on (extent size, device kind, format of the journal).
    layout: str


class _Fixed(msgspec.Struct, frozen=True, kw_only=True):
    identity: ArenaIdentity
    data_offset: int


class ArenaHeader:
    """Reads and writes a mapped header. The buffer stays owned by the arena."""

    def __init__(self, buffer: memoryview) -> None:
        """Raises ArenaError when the bytes are no header of this format."""
        if len(buffer) < HEADER_BYTES:
            raise ArenaError(f"too short for an arena header: {len(buffer)} bytes")
        magic, version, num_bytes, crc = _HEAD.unpack_from(buffer, 0)
        if magic != _MAGIC:
            raise ArenaError("not an arena: wrong magic")
        if version != _FORMAT:
            raise ArenaError(f"arena format {version}, this version reads format {_FORMAT}")
        encoded = bytes(buffer[_HEAD.size : _HEAD.size + num_bytes])
        if num_bytes > 1024 - _HEAD.size or zlib.crc32(encoded) != crc:
            raise ArenaError("the arena header is damaged (checksum)")
        fixed = msgspec.msgpack.decode(encoded, type=_Fixed)
        self.identity: Final = fixed.identity
        self.data_offset: Final = fixed.data_offset
        self._words = buffer[:HEADER_BYTES].cast("B").cast("Q")

    @staticmethod
    def write(buffer: memoryview, identity: ArenaIdentity, data_offset: int, incarnation: int) -> ArenaHeader:
        """Fills a fresh, zeroed buffer. The incarnation is any non-zero number that was not used before."""
        if not 0 < incarnation <= _MAX_WORD:
            raise ValueError(f"incarnation must be in 1 .. 2**64 - 1: {incarnation}")
        encoded = msgspec.msgpack.encode(_Fixed(identity=identity, data_offset=data_offset))
        if len(encoded) > 1024 - _HEAD.size:
            raise ArenaError(f"cluster and device name are too long for the arena header: {identity}")
        buffer[_HEAD.size : _HEAD.size + len(encoded)] = encoded
        buffer[: _HEAD.size] = _HEAD.pack(_MAGIC, _FORMAT, len(encoded), zlib.crc32(encoded))
        header = ArenaHeader(buffer)
        header.incarnation = incarnation
        return header

    @property
    def incarnation(self) -> int:
        return self._words[_INCARNATION_WORD]

    @incarnation.setter
    def incarnation(self, value: int) -> None:
        self._words[_INCARNATION_WORD] = value

    @property
    def num_restarts(self) -> int:
        return self._words[_RESTARTS_WORD]

    @num_restarts.setter
    def num_restarts(self, value: int) -> None:
        self._words[_RESTARTS_WORD] = value

    @property
    def effects_done(self) -> int:
        return self._words[_EFFECTS_WORD]

    @effects_done.setter
    def effects_done(self, record_no: int) -> None:
        self._words[_EFFECTS_WORD] = record_no

    @property
    def effect_step(self) -> int:
        return self._words[_STEP_WORD]

    @effect_step.setter
    def effect_step(self, num_done: int) -> None:
        self._words[_STEP_WORD] = num_done

    def generation(self, lease_slot: int) -> int:
        return self._words[self._lease_word(lease_slot)]

    def set_generation(self, lease_slot: int, generation: int) -> None:
        self._words[self._lease_word(lease_slot)] = generation

    def may_emit(self, lease_slot: int, generation: int, incarnation: int) -> bool:
        """Whether the lease still holds: two word reads, asked by replicas after each step."""
        words = self._words
        return words[_LEASE_WORDS + lease_slot] == generation and words[_INCARNATION_WORD] == incarnation

    def release(self) -> None:
        """Gives the buffer back; the header cannot be used any more."""
        self._words.release()

    @staticmethod
    def _lease_word(lease_slot: int) -> int:
        if not 0 <= lease_slot < MAX_LEASES:
            raise ValueError(f"lease slot {lease_slot} is not in 0 .. {MAX_LEASES - 1}")
        return _LEASE_WORDS + lease_slot
