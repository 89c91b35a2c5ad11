"""What the shell of a pool must do to shared memory before an answer leaves.

The shell journals a command, does its effects in order, notes in the arena after each that it is done, and answers.
`ZeroBlocks`, `CopyBlocks` and `ReencodeBlocks` are done once: after the answer has left, zeroing again would wipe what
the new owner wrote, and after a later effect has gone over its source, so would writing a copy again. After a restart
only what is not noted as done is done. An effect that was interrupted may be repeated as a whole, `SetGeneration` at
any time.
"""

from __future__ import annotations

import msgspec

from remora.namespaces.geometry import KVGeometry
from remora.platform.base.ids import GeometryId


class ZeroBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that change tenant: bytes [i * block_bytes, (i + 1) * block_bytes) of the arena's data become zero."""

    geometry_id: GeometryId
    block_bytes: int
    blocks: tuple[int, ...]


class CopyBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that come to lie elsewhere: (from, to) in block indices. No block is both source and target."""

    geometry_id: GeometryId
    block_bytes: int
    pairs: tuple[tuple[int, int], ...]


class ReencodeBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that come to lie there in another precision too: (from, to), in block indices of each geometry. No block's
    bytes are those of another."""

    source: KVGeometry
    target: KVGeometry
    pairs: tuple[tuple[int, int], ...]


class SetGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The generation word of a lease slot. A replica whose lease has another value may emit nothing more."""

    lease_slot: int
    value: int


Effect = ZeroBlocks | CopyBlocks | ReencodeBlocks | SetGeneration
