"""S3-FIFO: a small queue on probation in front of the main one.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. A new block waits in the small queue (a tenth
of the blocks); if it is found again there it moves to the main queue, else it goes and becomes a ghost. What comes back
while its ghost is remembered enters the main queue at once. Main is a FIFO that lets a block pass once more for each
time it was found, up to three.

Here a referenced block leaves its queue and comes back to the place it had: places are numbers in a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from remora.namespaces.ghosts import GhostList
from remora.platform.base.ids import BlockHash

if TYPE_CHECKING:
    from remora.namespaces.blocks import Block

_SMALL, _MAIN = 1, 2
_SMALL_SHARE = 0.1
_MAX_USES = 3


class _Queue:
    """Blocks by place, lowest first; O(log n)."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        #: Places; one counts while a block has it.
        self._heap: list[int] = []

    def put(self, block: Block) -> None:
        self.blocks[block.stamp] = block
        heapq.heappush(self._heap, block.stamp)
        if len(self._heap) > 2 * len(self.blocks) + 64:
            self._heap = sorted(self.blocks)

    def head(self) -> Block:
        while self._heap[0] not in self.blocks:
            heapq.heappop(self._heap)
        return self.blocks[self._heap[0]]

    def __len__(self) -> int:
        return len(self.blocks)


class _Dump(msgspec.Struct, frozen=True, array_like=True):
    cached: list[int]
    ghosts: list[BlockHash]
    next_place: int
    num_small: int
    num_main: int


class S3FifoPolicy:
    """`rank` is the block's queue, `stamp` its place, `uses` the passes it has left."""

    def __init__(self) -> None:
        self._queues = {_SMALL: _Queue(), _MAIN: _Queue()}
        self._ghosts = GhostList()
        self._next_place = 1
        #: Blocks of each queue, with those that are referenced.
        self._num_blocks = {_SMALL: 0, _MAIN: 0}

    def add(self, block: Block) -> None:
        if not block.rank:
            assert block.block_hash is not None
            self._enter(block, _MAIN if self._ghosts.recall(block.block_hash) else _SMALL)
        self._queues[block.rank].put(block)

    def _enter(self, block: Block, rank: int) -> None:
        block.rank = rank
        block.stamp = self._next_place
        self._next_place += 1
        self._num_blocks[rank] += 1

    def take(self, block: Block) -> None:
        del self._queues[block.rank].blocks[block.stamp]

    def hit(self, block: Block) -> None:
        block.uses = min(block.uses + 1, _MAX_USES)

    def retire(self, block: Block) -> None:
        """Not part of the published policy."""

    def evict(self, block: Block) -> None:
        self.take(block)
        self._num_blocks[block.rank] -= 1
        if block.rank == _SMALL and block.block_hash is not None:
            self._ghosts.remember(block.block_hash)
            self._ghosts.trim(sum(self._num_blocks.values()))

    def first(self) -> Block | None:
        """Moves blocks that were found again on their way; each pass has been paid for by a hit."""
        small, main = self._queues[_SMALL], self._queues[_MAIN]
        while small or main:
            total = sum(self._num_blocks.values())
            if small and (not main or self._num_blocks[_SMALL] > _SMALL_SHARE * total):
                block = small.head()
                if not block.uses:
                    return block
                block.uses = 0
            else:
                block = main.head()
                if not block.uses:
                    return block
                block.uses -= 1
            self.take(block)
            self._num_blocks[block.rank] -= 1
            self._enter(block, _MAIN)
            main.put(block)
        return None

    def blocks(self) -> Iterable[Block]:
        return self._cached()

    def _cached(self) -> Iterator[Block]:
        for queue in self._queues.values():
            yield from queue.blocks.values()

    def dump(self) -> bytes:
        state = _Dump(
            sorted(block.index for block in self._cached()),
            self._ghosts.dump(),
            self._next_place,
            self._num_blocks[_SMALL],
            self._num_blocks[_MAIN],
        )
        return msgspec.msgpack.encode(state)

    def load(self, data: bytes, blocks: Mapping[int, Block]) -> None:
        state = msgspec.msgpack.decode(data, type=_Dump)
        for index in state.cached:
            self._queues[blocks[index].rank].put(blocks[index])
        self._ghosts.load(state.ghosts)
        self._next_place = state.next_place
        self._num_blocks = {_SMALL: state.num_small, _MAIN: state.num_main}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())
