"""Sealed blocks that are read from outside the pool: referenced for a bounded time.

A reader holds a prefix of a chain with all its ancestors, copies the bytes, and lets go; one that does not come back is
forgotten when its time is over. Until then the bytes neither go nor move nor change, also across a crash of the pool,
so that a copy that was finished in time is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remora.namespaces.blocks import Block, BlockLedger
from remora.namespaces.extents import GeometrySpace
from remora.namespaces.hold_commands import Held
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import HoldId

#: More readers at once find nothing.
MAX_HOLDS = 256


class HeldChain:
    """Blocks of one reader; one reference on each."""

    __slots__ = ("blocks", "space", "until_s")

    def __init__(self, space: GeometrySpace, blocks: list[Block], until_s: float) -> None:
        self.space = space
        self.blocks = blocks
        self.until_s = until_s

    def describe(self) -> Held:
        """Where its blocks are, and until when."""
        indices = tuple([block.index for block in self.blocks])
        return Held(blocks=indices, block_bytes=self.space.block_bytes, until_s=self.until_s)


class Holds:
    """All holds of a pool, in order of their begin."""

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self.chains: dict[HoldId, HeldChain] = {}

    def __len__(self) -> int:
        return len(self.chains)

    def begin(self, hold_id: HoldId, blocks: list[Block], until_s: float) -> HeldChain | None:
        """References the blocks of a chain; None when there are none or too many readers."""
        if not blocks or len(self.chains) >= MAX_HOLDS:
            return None
        for block in blocks:
            self._ledger.acquire(block)
        chain = self.chains[hold_id] = HeldChain(blocks[0].holding.space, blocks, until_s)
        return chain

    def end(self, hold_ids: Iterable[HoldId]) -> int:
        """Drops references, tail first. Returns how many holds there were."""
        chains = [self.chains.pop(hold_id) for hold_id in hold_ids if hold_id in self.chains]
        for chain in chains:
            for block in reversed(chain.blocks):
                self._ledger.drop(block)
        return len(chains)

    def expire(self, now_s: float) -> int:
        """Ends what has run out. Returns how many."""
        return self.end([hold_id for hold_id, chain in self.chains.items() if chain.until_s <= now_s])

    def references(self) -> Iterator[Block]:
        """Every block, once for each hold on it."""
        for chain in self.chains.values():
            yield from chain.blocks

    def check_integrity(self) -> None:
        """Raises IntegrityError when a held block is not sealed, or is gone."""
        for hold_id, chain in self.chains.items():
            for block in chain.blocks:
                if block.block_hash is None or block.extent.blocks.get(block.index) is not block:
                    raise IntegrityError(f"{hold_id} holds block {block.index}, which is free or private")
                if block.extent.space is not chain.space:
                    raise IntegrityError(f"{hold_id} holds block {block.index} of another geometry")
