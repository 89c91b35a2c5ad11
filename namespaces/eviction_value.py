"""The default: what is expected to save the least goes first.

All blocks of a holding have the same bytes, and computing them again costs about the same, so that saved seconds per
byte rank like returns per block: how often blocks of this class and age come back (namespaces/reuse_model.py, learnt
with ghosts), times what the session's priority makes of a saved second. A class is how often the content was found so
far, and the priority; within a class the least recently released goes first. So the balance of recency and frequency is
learnt, not set, and a priority counts twice: by its weight, and by how its sessions turn out to behave.

Weights of namespaces are no matter of this order: they decide whose blocks have to go (namespaces/placement.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from remora.namespaces.reuse_model import ReuseModel
from remora.platform.base.ids import BlockHash

if TYPE_CHECKING:
    from remora.namespaces.blocks import Block

#: More finds than this make no other class.
_MAX_USES = 3
#: Priorities beyond these count as these; each step up doubles the worth of a block.
_MAX_LEVEL = 2
_NUM_LEVELS = 2 * _MAX_LEVEL + 1
#: Class of what belonged only to sessions that have ended: worth nothing until it is used again.
_RETIRED = 1 + (_MAX_USES + 1) * _NUM_LEVELS
#: By class: what a saved second of its priority is worth; 0 belongs to no class.
_WEIGHTS = (0, *(1 << level for _ in range(_MAX_USES + 1) for level in range(_NUM_LEVELS)))
#: Ghosts that are remembered for each block held: the ages a block is observed at beyond its stay.
_GHOSTS_PER_BLOCK = 4
_MAX_GHOSTS = 1 << 18


class _Dump(msgspec.Struct, frozen=True, array_like=True):
    #: By class, in the order in which it came to be.
    queues: dict[int, list[int]]
    #: Hash, class, release, uses.
    ghosts: list[tuple[BlockHash, int, int, int]]
    now: int
    capacity: int
    model: bytes


class ValuePolicy:
    """`rank` is the block's class + 1, `stamp` the policy's clock at its release, `uses` how often it was found.

    O(classes) = O(1) an operation, amortised. What was learnt is worked out when a block has to go: a fraction of a
    millisecond a class, twelve to twenty-four times a turnover at most.
    """

    def __init__(self) -> None:
        self._model = ReuseModel()
        #: Least recently released first.
        self._queues: dict[int, OrderedDict[Block, None]] = {}
        self._ghosts: OrderedDict[BlockHash, tuple[int, int, int]] = OrderedDict()
        #: Releases so far.
        self._now = 0
        #: The most blocks cached at once.
        self._capacity = 0
        self._num_cached = 0

    def add(self, block: Block) -> None:
        if not block.rank and block.block_hash is not None:
            ghost = self._ghosts.pop(block.block_hash, None)
            if ghost is not None:
                rank, stamp, uses = ghost
                self._model.leave(rank, stamp)
                self._model.returned(rank, self._now - stamp)
                block.uses = min(block.uses + uses + 1, _MAX_USES)
        self._now += 1
        self._capacity = max(self._capacity, self._num_cached + 1)
        if self._now >= self._model.next_tick:
            self._model.tick(self._now, self._capacity)
        level = max(-_MAX_LEVEL, min(block.level, _MAX_LEVEL)) if block.level else 0
        block.rank = 1 + block.uses * _NUM_LEVELS + _MAX_LEVEL + level
        block.stamp = self._now
        self._list(block)

    def _list(self, block: Block) -> None:
        self._num_cached += 1
        self._model.enter(block.rank, block.stamp)
        queue = self._queues.get(block.rank)
        if queue is None:
            queue = self._queues[block.rank] = OrderedDict()
        queue[block] = None

    def take(self, block: Block) -> None:
        self._unlist(block)
        self._model.leave(block.rank, block.stamp)

    def _unlist(self, block: Block) -> None:
        queue = self._queues[block.rank]
        del queue[block]
        if not queue:
            del self._queues[block.rank]
        self._num_cached -= 1

    def hit(self, block: Block) -> None:
        block.uses = min(block.uses + 1, _MAX_USES)
        if block.rank:
            self._model.returned(block.rank, self._now - block.stamp)
            block.stamp = self._now

    def retire(self, block: Block) -> None:
        self.take(block)
        block.rank = _RETIRED
        self._list(block)

    def evict(self, block: Block) -> None:
        self._unlist(block)
        assert block.block_hash is not None
        self._ghosts[block.block_hash] = (block.rank, block.stamp, block.uses)
        while len(self._ghosts) > min(_GHOSTS_PER_BLOCK * self._capacity, _MAX_GHOSTS):
            _, (rank, stamp, _) = self._ghosts.popitem(last=False)
            self._model.leave(rank, stamp)

    def first(self) -> Block | None:
        lowest: tuple[float, int] | None = None
        chosen: Block | None = None
        for rank, queue in self._queues.items():
            block = next(iter(queue))
            if rank == _RETIRED:
                return block
            worth = (_WEIGHTS[rank] * self._model.worth(rank, self._now - block.stamp), block.stamp)
            if lowest is None or worth < lowest:
                lowest, chosen = worth, block
        return chosen

    def blocks(self) -> Iterable[Block]:
        return self._cached()

    def _cached(self) -> Iterator[Block]:
        for queue in self._queues.values():
            yield from queue

    def dump(self) -> bytes:
        state = _Dump(
            {rank: [block.index for block in queue] for rank, queue in sorted(self._queues.items())},
            [(block_hash, *ghost) for block_hash, ghost in self._ghosts.items()],
            self._now,
            self._capacity,
            self._model.dump(),
        )
        return msgspec.msgpack.encode(state)

    def load(self, data: bytes, blocks: Mapping[int, Block]) -> None:
        state = msgspec.msgpack.decode(data, type=_Dump)
        for rank, cached in state.queues.items():
            self._queues[rank] = OrderedDict((blocks[index], None) for index in cached)
            self._num_cached += len(cached)
        self._ghosts.update((block_hash, (rank, stamp, uses)) for block_hash, rank, stamp, uses in state.ghosts)
        self._now = state.now
        self._capacity = state.capacity
        self._model.load(state.model)

    def __len__(self) -> int:
        return self._num_cached
