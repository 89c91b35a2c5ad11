"""What the full blocks of one run are called: by the plain chain of their tokens, or for what they are."""

from __future__ import annotations

from collections.abc import Sequence

from remora.namespaces.hashing import converted_hash, following_hash
from remora.namespaces.kept_chains import KeptMatch
from remora.platform.base.ids import BlockHash


class BlockNames:
    """Plain blocks at first, then some whose names are known one by one, then what is computed behind the last that was
    converted (namespaces/kept_chains.py). Without converted blocks everything is plain."""

    def __init__(self, found: KeptMatch | None = None) -> None:
        self._num_plain = found.num_plain if found is not None else 0
        self._known: list[BlockHash] = list(found.hashes) if found is not None else []
        self._stem = found.stem if found is not None else BlockHash(b"")

    @property
    def is_plain(self) -> bool:
        return not self._stem

    def of(self, plain: Sequence[BlockHash], first: int = 0) -> list[BlockHash]:
        """Names of the blocks whose plain hashes these are, from number `first` on."""
        if self.is_plain:
            return list(plain[first:])
        known_end = self._num_plain + len(self._known)
        return [
            *plain[first : self._num_plain],
            *self._known[max(0, first - self._num_plain) : max(0, len(plain) - self._num_plain)],
            *(following_hash(each, self._stem) for each in plain[max(first, known_end) :]),
        ]

    def convert(
        self, plain: Sequence[BlockHash], source: BlockHash, source_fingerprint: bytes, fingerprint: bytes
    ) -> None:
        """The block behind those whose plain hashes these are was converted from `source`."""
        names = self.of(plain)
        if self.is_plain:
            self._num_plain, self._known = len(names), []
        else:
            self._known = names[self._num_plain :]
        self._stem = converted_hash(names[-1] if names else None, source, source_fingerprint, fingerprint)
        self._known.append(self._stem)

    def forget(self, num_blocks: int) -> None:
        """Only the first so many are still what they were; what comes instead depends on converted KV all the same."""
        del self._known[max(0, num_blocks - self._num_plain) :]
        self._num_plain = min(self._num_plain, num_blocks)
