"""Hashes of blocks that are in a cache, as far as one can tell without asking it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from remora.platform.base.ids import BlockHash

#: Remembered block hashes: two million tokens of 32 to a block, in 9 MB.
MAX_HINTS = 1 << 16


class PrefixHints:
    """Hashes of blocks that were seen in the cache lately: a guess at what is cached."""

    def __init__(self) -> None:
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()

    def add(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._seen[block_hash] = None
            self._seen.move_to_end(block_hash)
        while len(self._seen) > MAX_HINTS:
            self._seen.popitem(last=False)

    def discard(self, hashes: Iterable[BlockHash]) -> None:
        """They turned out not to be there."""
        for block_hash in hashes:
            self._seen.pop(block_hash, None)

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first hashes, without a gap, were seen."""
        for i, block_hash in enumerate(hashes):
            if block_hash not in self._seen:
                return i
        return len(hashes)
