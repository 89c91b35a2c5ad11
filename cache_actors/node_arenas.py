"""Single blocks out of arenas, without a word to their pools: for a request that is handed over. Those of this node are
mapped, those of others read over links that are there already.

Nobody holds the blocks for the reader. What makes a copy good is its checksum alone, which the owner took while it
stood still: bytes that changed since, in whatever way, are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.arena import Arena
from remora.cache_actors.block_exports import checksum
from remora.cache_actors.port import KVSource

#: Longest that a tail of another node is waited for. The engine's other requests wait as well.
TAIL_TIMEOUT_S: Final = 0.25


class OtherNodes(Protocol):
    """Pools of other nodes (cache_actors/pool_reader.py)."""

    def prepare(self, source: KVSource) -> None:
        """Has a link to a pool made in the background."""
        ...

    def read_tail(
        self, source: KVSource, blocks: Sequence[int], block_bytes: int, *, timeout_s: float
    ) -> Iterator[NDArray[np.uint8]]:
        """Blocks in order, each valid until the next; nothing without a link. Raises Unavailable."""
        ...


class NodeArenas:
    """Seen by the owner of one of them. Not thread-safe."""

    def __init__(
        self, node_id: str, arena_path: str, data: NDArray[np.uint8], others: OtherNodes | None = None
    ) -> None:
        """`data` is the own arena, which lies at `arena_path`. Without `others` nothing comes from other nodes."""
        self._others = others
        self.node_id = node_id
        self.arena_path = arena_path
        self._data = data
        self._buffer = np.empty(0, np.uint8)

    def checksum(self, block: int, block_bytes: int) -> int:
        """Of a block of the own arena."""
        return checksum(self._data[block * block_bytes : (block + 1) * block_bytes])

    def prepare(self, source: KVSource | None) -> None:
        """A tail may soon be read from that pool."""
        if source is not None and self._others is not None:
            self._others.prepare(source)

    def read(
        self,
        node_id: str,
        arena_path: str,
        blocks: Sequence[tuple[int, int]],
        block_bytes: int,
        source: KVSource | None = None,
    ) -> Iterator[NDArray[np.uint8]]:
        """Copies of (block, checksum), in order, up to the first that is not as its checksum says. Each is valid until
        the next is asked for. Raises ArenaError when there is no such arena, Unavailable when another node does not
        answer in time."""
        if not arena_path:
            return
        if node_id != self.node_id:
            if self._others is not None and source is not None:
                indices = [block for block, _ in blocks]
                found = self._others.read_tail(source, indices, block_bytes, timeout_s=TAIL_TIMEOUT_S)
                for row, (_, expected) in zip(found, blocks, strict=False):
                    if checksum(row) != expected:
                        return
                    yield row
            return
        if arena_path == self.arena_path:
            yield from self._sound(self._data, blocks, block_bytes)
            return
        with closing(Arena.open(Path(arena_path), writable=False)) as arena:
            yield from self._sound(arena.data, blocks, block_bytes)

    def _sound(
        self, data: NDArray[np.uint8], blocks: Sequence[tuple[int, int]], block_bytes: int
    ) -> Iterator[NDArray[np.uint8]]:
        if len(self._buffer) != block_bytes:
            self._buffer = np.empty(block_bytes, np.uint8)
        for block, expected in blocks:
            end = (block + 1) * block_bytes
            if not 0 < end <= len(data):
                return
            self._buffer[:] = data[end - block_bytes : end]
            if checksum(self._buffer) != expected:
                return
            yield self._buffer
