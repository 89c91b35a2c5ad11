"""A session's KV that is cached in another precision than it is wanted in: found, converted, and named for what it is.

    other format    s0  s1  s2  s3                        what the session computed before
                     │   │   │   │   re-encoded, bytes of s untouched
    this format     c0  c1  c2  c3  f4  f5                computed behind them

Converted KV is not what this format would have computed, so c and f have names of their own (namespaces/hashing.py).
They are looked for only by an admission that names the other chain: that of a session, for tokens it had before. Who
brings the same tokens without that gets a miss. Converted blocks may stand behind plain ones: what is cached plainly is
preferred, as far as it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from remora.namespaces.hashing import converted_hash, following_hash
from remora.namespaces.prefix_index import PrefixIndex, Realm
from remora.platform.base.ids import BlockHash

if TYPE_CHECKING:
    from remora.namespaces.blocks import Block


class KeptChain(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks that a session had are called in another precision of the same model."""

    fingerprint: bytes
    hashes: tuple[BlockHash, ...]


class KeptMatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an admission with kept chains found."""

    #: So many of the cached blocks have the names that the admission gave; those behind them have these.
    num_plain: int = 0
    hashes: tuple[BlockHash, ...] = ()
    #: The last of those that was converted: what is computed is named behind it. Empty: nothing was.
    stem: BlockHash = BlockHash(b"")
    #: The chain that reaches farthest in its own precision, and how many blocks of it there are.
    chain_no: int = 0
    num_source_blocks: int = 0


def match_kept(
    index: PrefixIndex, realm: Realm, hashes: Sequence[BlockHash], chains: Sequence[KeptChain], max_blocks: int
) -> tuple[list[Block], KeptMatch]:
    """The longest cached prefix, plain at first and then converted; of equal ones the one with most plain blocks."""
    plain = index.match(realm, hashes, max_blocks)
    best, match = plain, KeptMatch(num_plain=len(plain))
    for start in range(len(plain), -1, -1):
        # Seldom does anything but the next plain block stand behind a plain one.
        if start and len(plain[start - 1].children or ()) <= (start < len(plain)):
            continue
        found, names, stem = _walk(realm, hashes[:max_blocks], chains, plain[:start])
        if len(found) > len(best):
            best, match = found, KeptMatch(num_plain=start, hashes=tuple(names), stem=stem)
    sources = [len(index.find(each.fingerprint, realm.key.domain, each.hashes[:max_blocks])) for each in chains]
    farthest = max(range(len(chains)), key=lambda number: sources[number], default=0)
    return best, msgspec.structs.replace(
        match, chain_no=farthest, num_source_blocks=sources[farthest] if sources else 0
    )


def _walk(
    realm: Realm, hashes: Sequence[BlockHash], chains: Sequence[KeptChain], plain: Sequence[Block]
) -> tuple[list[Block], list[BlockHash], BlockHash]:
    """Goes on behind plain blocks with converted ones and what was computed behind them. Returns all blocks, the names
    of those that are not plain, and the last converted one's."""
    found, names, stem = list(plain), list[BlockHash](), BlockHash(b"")
    for position in range(len(plain), len(hashes)):
        parent = found[-1] if found else None
        above = parent.block_hash if parent is not None else None
        block, name = None, BlockHash(b"")
        for chain in chains:
            if position < len(chain.hashes):
                name = converted_hash(above, chain.hashes[position], chain.fingerprint, realm.key.fingerprint)
                block = realm.blocks.get(name)
                if block is not None:
                    stem = name
                    break
        if block is None and stem:
            name = following_hash(hashes[position], stem)
            block = realm.blocks.get(name)
        if block is None or block.parent is not parent:
            break
        found.append(block)
        names.append(name)
    return found, names, stem
