"""Ghosts: what is remembered of blocks that were evicted, by the hash of their content."""

from __future__ import annotations

from collections import OrderedDict

from remora.platform.base.ids import BlockHash


class GhostList:
    """Hashes of evicted content, oldest first, at most so many as `trim` leaves. O(1) an operation."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def remember(self, block_hash: BlockHash) -> None:
        self._hashes[block_hash] = None
        self._hashes.move_to_end(block_hash)

    def recall(self, block_hash: BlockHash) -> bool:
        """Whether the content was remembered; it is so no longer."""
        if block_hash not in self._hashes:
            return False
        del self._hashes[block_hash]
        return True

    def trim(self, size: int) -> None:
        """Forgets the oldest until at most `size` are left."""
        while len(self._hashes) > max(0, size):
            self._hashes.popitem(last=False)

    def dump(self) -> list[BlockHash]:
        return list(self._hashes)

    def load(self, hashes: list[BlockHash]) -> None:
        self._hashes.update(dict.fromkeys(hashes))

    def __len__(self) -> int:
        return len(self._hashes)
