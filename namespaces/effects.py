"""What the shell of a pool must do to shared memory before an answer leaves.

Order in the shell: journal the command, do its effects, journal `EffectsDone` (namespaces/journal.py), answer.
`ZeroBlocks` is done once: replaying it after its answer has left would wipe what the new owner wrote.
`SetGeneration` may be repeated.
"""

from __future__ import annotations

import msgspec

from remora.platform.base.ids import GeometryId


class ZeroBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that change tenant: bytes [i * block_bytes, (i + 1) * block_bytes) of the arena's data become zero."""

    geometry_id: GeometryId
    block_bytes: int
    blocks: tuple[int, ...]


class SetGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The generation word of a lease slot. A replica whose lease has another value may emit nothing more."""

    lease_slot: int
    value: int


Effect = ZeroBlocks | SetGeneration
