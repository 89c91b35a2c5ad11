"""Which pool is preferred for what begins alike: the same in every process, without anybody being asked.

    request ──► pool with the highest score of its key          (routers)
    chain   ──► the highest of those on other nodes: its backup (replication)

So when a node is gone, routers prefer for its requests the very pools that have their blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from remora.platform.base.ids import BlockHash, NamespaceId, PoolId

#: Blocks that make the key: long enough to tell system prompts apart, short enough that turns of a conversation agree.
NUM_KEY_BLOCKS = 4


def affinity_key(namespace_id: NamespaceId, block_hashes: Sequence[BlockHash]) -> bytes:
    """Equal for requests of one namespace whose first blocks are equal.

    Uses the last of the first NUM_KEY_BLOCKS chain hashes, which stands for all before it.
    """
    last = block_hashes[min(len(block_hashes), NUM_KEY_BLOCKS) - 1] if block_hashes else b""
    return namespace_id.encode() + b"\0" + last


def rendezvous_score(key: bytes, pool_id: PoolId) -> int:
    """Highest wins; adding or removing a pool moves only that pool's keys."""
    digest = hashlib.blake2b(pool_id.encode(), key=hashlib.blake2b(key, digest_size=32).digest(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")
