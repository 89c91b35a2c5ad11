"""ARC: blocks used once and blocks used again share the memory as their ghosts ask for.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. What comes back after it was evicted
from the once-used blocks says that they had too little room, and the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from remora.namespaces.ghosts import GhostList
from remora.platform.base.ids import BlockHash

if TYPE_CHECKING:
    from remora.namespaces.blocks import Block

_ONCE, _AGAIN = 1, 2


class _Dump(msgspec.Struct, frozen=True, array_like=True):
    once: list[int]
    again: list[int]
    once_ghosts: list[BlockHash]
    again_ghosts: list[BlockHash]
    target: float
    num_once: int
    num_again: int


class ArcPolicy:
    """`rank` is the block's list; `uses` is 1 from a hit until the block is cached again. O(1) an operation."""

    def __init__(self) -> None:
        #: Least recently released first.
        self._lists: dict[int, OrderedDict[Block, None]] = {_ONCE: OrderedDict(), _AGAIN: OrderedDict()}
        self._ghosts = {_ONCE: GhostList(), _AGAIN: GhostList()}
        #: Blocks of each list, with those that are referenced.
        self._num_blocks = {_ONCE: 0, _AGAIN: 0}
        #: Blocks that the once-used may hold.
        self._target = 0.0

    def add(self, block: Block) -> None:
        if not block.rank:
            self._enter(block)
        elif block.uses and block.rank == _ONCE:
            self._num_blocks[_ONCE] -= 1
            self._num_blocks[_AGAIN] += 1
            block.rank = _AGAIN
        block.uses = 0
        self._lists[block.rank][block] = None

    def _enter(self, block: Block) -> None:
        assert block.block_hash is not None
        num_once, num_again = max(1, len(self._ghosts[_ONCE])), max(1, len(self._ghosts[_AGAIN]))
        block.rank = _AGAIN
        if self._ghosts[_ONCE].recall(block.block_hash):
            self._target = min(self._target + max(1.0, num_again / num_once), float(self._num_known + 1))
        elif self._ghosts[_AGAIN].recall(block.block_hash):
            self._target = max(self._target - max(1.0, num_once / num_again), 0.0)
        else:
            block.rank = _AGAIN if block.uses else _ONCE
        self._num_blocks[block.rank] += 1

    @property
    def _num_known(self) -> int:
        return self._num_blocks[_ONCE] + self._num_blocks[_AGAIN]

    def take(self, block: Block) -> None:
        del self._lists[block.rank][block]

    def hit(self, block: Block) -> None:
        block.uses = 1

    def retire(self, block: Block) -> None:
        """Not part of the published policy."""

    def evict(self, block: Block) -> None:
        self.take(block)
        capacity = self._num_known
        self._num_blocks[block.rank] -= 1
        if block.block_hash is None:
            return
        self._ghosts[block.rank].remember(block.block_hash)
        self._ghosts[_ONCE].trim(capacity - self._num_blocks[_ONCE])
        self._ghosts[_AGAIN].trim(2 * capacity - self._num_known - len(self._ghosts[_ONCE]))

    def first(self) -> Block | None:
        once, again = self._lists[_ONCE], self._lists[_AGAIN]
        from_once = once and (self._num_blocks[_ONCE] > self._target or not again)
        return next(iter(once if from_once else again), None)

    def blocks(self) -> Iterable[Block]:
        return self._cached()

    def _cached(self) -> Iterator[Block]:
        yield from self._lists[_ONCE]
        yield from self._lists[_AGAIN]

    def dump(self) -> bytes:
        state = _Dump(
            [block.index for block in self._lists[_ONCE]],
            [block.index for block in self._lists[_AGAIN]],
            self._ghosts[_ONCE].dump(),
            self._ghosts[_AGAIN].dump(),
            self._target,
            self._num_blocks[_ONCE],
            self._num_blocks[_AGAIN],
        )
        return msgspec.msgpack.encode(state)

    def load(self, data: bytes, blocks: Mapping[int, Block]) -> None:
        state = msgspec.msgpack.decode(data, type=_Dump)
        for rank, cached in ((_ONCE, state.once), (_AGAIN, state.again)):
            self._lists[rank].update((blocks[index], None) for index in cached)
        self._ghosts[_ONCE].load(state.once_ghosts)
        self._ghosts[_AGAIN].load(state.again_ghosts)
        self._target = state.target
        self._num_blocks = {_ONCE: state.num_once, _AGAIN: state.num_again}

    def __len__(self) -> int:
        return len(self._lists[_ONCE]) + len(self._lists[_AGAIN])
