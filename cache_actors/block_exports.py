"""Blocks of a pool for readers outside it: found, held, and given out as bytes with their checksums.

reader on the node        hold ─► maps the arena, copies ─► unhold
reader on another node    hold ─► read, piece by piece ─► unhold
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.durable_pool import DurablePool
from remora.cache_actors.pool_settings import POOL_LEASE
from remora.namespaces.commands import AnyAnswer
from remora.namespaces.hold_commands import Held, Hold, Unhold
from remora.platform.base.ids import HoldId


class BlockBytes(NamedTuple):
    """Blocks as they cross a wire, and the checksum of each as it lay in its arena."""

    data_NB: NDArray[np.uint8]
    checksums: tuple[int, ...]


def checksum(block: NDArray[np.uint8]) -> int:
    """CRC-32 of a block's bytes: what must be equal on both sides of a crossing (design §4.9)."""
    return zlib.crc32(block.data)


def host_bytes(data: Any, start: int, end: int) -> NDArray[np.uint8]:
    """A range of an arena: a view, or a copy of what lies on a GPU."""
    part = data[start:end]
    found: NDArray[np.uint8] = part.get() if hasattr(part, "get") else part
    return found


def copy_blocks(data: NDArray[np.uint8], blocks: Sequence[int], into_NB: NDArray[np.uint8]) -> tuple[int, ...]:
    """Copies blocks out of an arena; returns the checksum of each as it lay there."""
    size, sums = into_NB.shape[1], []
    for row, block in zip(into_NB, blocks, strict=True):
        source = host_bytes(data, block * size, (block + 1) * size)
        sums.append(checksum(source))
        row[:] = source
    return tuple(sums)


def hold_command(command: Hold) -> Hold:
    """As a command of the pool itself, whoever sent it."""
    return msgspec.structs.replace(command, lease_id=POOL_LEASE, call_no=0)


def unhold_command(hold_ids: Sequence[HoldId]) -> Unhold:
    return Unhold(lease_id=POOL_LEASE, hold_ids=tuple(hold_ids))


def as_held(answer: AnyAnswer) -> Held:
    """A pool that refuses has nothing to give."""
    return answer if isinstance(answer, Held) else Held()


async def read_blocks(pool: DurablePool, hold_id: HoldId, first: int, count: int) -> BlockBytes | None:
    """Copies blocks `first` .. `first + count` of a hold out of the arena, beside the event loop.

    None when the hold does not have them, or has run out meanwhile: then the bytes may be anybody's.
    """
    held = pool.held(hold_id)
    if first < 0 or count < 1 or first + count > len(held.blocks):
        return None
    found = await asyncio.to_thread(_copy, pool.arena.data, held.blocks[first : first + count], held.block_bytes)
    return found if pool.held(hold_id).blocks else None


def _copy(data: NDArray[np.uint8], blocks: Sequence[int], block_bytes: int) -> BlockBytes:
    data_NB = np.empty((len(blocks), block_bytes), np.uint8)
    return BlockBytes(data_NB, copy_blocks(data, blocks, data_NB))
