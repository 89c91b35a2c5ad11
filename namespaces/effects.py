"""What the shell of a pool must do to shared memory before an answer leaves.

The shell journals a command, does its effects, notes in the arena that they are done, and answers. `ZeroBlocks` is done
once: after its answer has left, doing it again would wipe what the new owner wrote. So after a restart only the effects
of commands behind that note are done again. `SetGeneration` may be repeated.
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
