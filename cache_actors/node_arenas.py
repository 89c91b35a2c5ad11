"""Single blocks out of the arenas of this node, without a word to their pools: for a request that is handed over.

Nobody holds the blocks for the reader. What makes a copy good is its checksum alone, which the owner took while it
stood still: bytes that changed since, in whatever way, are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.arena import Arena
from remora.cache_actors.block_exports import checksum


class NodeArenas:
    """Seen by the owner of one of them. Not thread-safe."""

    def __init__(self, node_id: str, arena_path: str, data: NDArray[np.uint8]) -> None:
        """`data` is the own arena, which lies at `arena_path`."""
        self.node_id = node_id
        self.arena_path = arena_path
        self._data = data
        self._buffer = np.empty(0, np.uint8)

    def checksum(self, block: int, block_bytes: int) -> int:
        """Of a block of the own arena."""
        return checksum(self._data[block * block_bytes : (block + 1) * block_bytes])

    def read(
        self, node_id: str, arena_path: str, blocks: Sequence[tuple[int, int]], block_bytes: int
    ) -> Iterator[NDArray[np.uint8]]:
        """Copies of (block, checksum), in order, up to the first that is not as its checksum says. Each is valid until
        the next is asked for. Raises ArenaError when there is no such arena; nothing comes from another node."""
        if node_id != self.node_id or not arena_path:
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
