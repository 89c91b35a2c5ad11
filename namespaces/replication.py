"""What of a pool's sealed blocks has still to be copied to another node, and where to.

    sealed ──► pending chain (its last block) ──► order: the next blocks of it ──► copied, or refused there
                 ▲ its child is sealed: the chain is one longer

Only ends of chains are kept, so that a conversation is one entry however long it is. What is evicted meanwhile is not
copied any more. A chain whose backup is another one than before, as after a restart, may miss there as a whole: its
backup knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from remora.namespaces.chains import Chain, Link
from remora.namespaces.rendezvous import affinity_key, rendezvous_score
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import BlockHash, NamespaceId, PoolId

#: Chains that may be pending; of more the oldest are given up.
MAX_CHAINS = 4096


class ReplicationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of one namespace in one pool."""

    #: Sealed here and not on another node yet, as far as is known.
    lag_blocks: int = 0
    lag_bytes: int = 0
    #: Age of the oldest of them.
    lag_s: float = 0.0
    #: Since the pool began: copied to other nodes, and given up because there is no room there.
    copied_blocks: int = 0
    copied_bytes: int = 0
    dropped_blocks: int = 0


class PendingChain:
    """A chain that is longer here than on its backup."""

    __slots__ = ("block_bytes", "namespace_id", "num_blocks", "since_s", "tip")

    def __init__(self, namespace_id: NamespaceId, tip: BlockHash, block_bytes: int, since_s: float) -> None:
        self.namespace_id = namespace_id
        self.tip = tip
        self.block_bytes = block_bytes
        #: Blocks that are missing there, as far as is known.
        self.num_blocks = 1
        self.since_s = since_s


class _Totals:
    __slots__ = ("copied_blocks", "copied_bytes", "dropped_blocks")

    def __init__(self) -> None:
        self.copied_blocks = self.copied_bytes = self.dropped_blocks = 0


class Backlog:
    """Of one pool. Not thread-safe."""

    def __init__(self, namespace_ids: Iterable[NamespaceId], *, max_chains: int = MAX_CHAINS) -> None:
        """`namespace_ids`: those whose blocks are copied."""
        self._max_chains = max_chains
        self._totals = {namespace_id: _Totals() for namespace_id in namespace_ids}
        #: Those that wait longest first.
        self._pending: OrderedDict[BlockHash, PendingChain] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, block_hash: BlockHash, link: Link, now_s: float) -> None:
        """A block was sealed. Those of other namespaces are ignored."""
        if link.namespace_id not in self._totals or block_hash in self._pending:
            return
        pending = self._pending.pop(link.parent, None) if link.parent is not None else None
        if pending is None:
            pending = PendingChain(link.namespace_id, block_hash, link.block_bytes, now_s)
        else:
            pending.tip = block_hash
            pending.num_blocks += 1
        self._pending[block_hash] = pending
        if len(self._pending) > self._max_chains:
            self.drop(next(iter(self._pending.values())))

    def add_chain(self, chain: Chain, now_s: float) -> bool:
        """A whole chain may be missing, because it has another backup now. False if no more may be pending."""
        tip = chain.hashes[-1]
        if chain.namespace_id in self._totals and tip not in self._pending:
            if len(self._pending) >= self._max_chains:
                return False
            pending = PendingChain(chain.namespace_id, tip, chain.geometry.block_bytes, now_s)
            pending.num_blocks = len(chain.hashes)
            self._pending[tip] = pending
        return True

    def next(self) -> PendingChain | None:
        """Whose turn it is; it goes to the end of the line."""
        if not self._pending:
            return None
        tip, pending = next(iter(self._pending.items()))
        self._pending.move_to_end(tip)
        return pending

    def copied(self, pending: PendingChain, tip: BlockHash, *, num_copied: int, num_missing: int, now_s: float) -> None:
        """So many blocks of the chain that ended with `tip` were copied now; so many of it are missing there still."""
        totals = self._totals[pending.namespace_id]
        totals.copied_blocks += num_copied
        totals.copied_bytes += num_copied * pending.block_bytes
        if not num_missing:
            pending.since_s = now_s
        if pending.tip != tip:
            # It has grown meanwhile, so at least that is missing.
            pending.num_blocks = num_missing + 1
        elif num_missing:
            pending.num_blocks = num_missing
        else:
            self._pending.pop(pending.tip, None)

    def drop(self, pending: PendingChain) -> None:
        """Gives a chain up: it will not be copied unless it grows."""
        if self._pending.get(pending.tip) is pending:
            del self._pending[pending.tip]
            self._totals[pending.namespace_id].dropped_blocks += pending.num_blocks

    def forget(self, pending: PendingChain) -> None:
        """It was evicted here: nothing is missing any more."""
        if self._pending.get(pending.tip) is pending:
            del self._pending[pending.tip]

    def report(self, now_s: float) -> dict[NamespaceId, ReplicationReport]:
        """Of every namespace whose blocks are copied."""
        by_namespace: dict[NamespaceId, list[PendingChain]] = {namespace_id: [] for namespace_id in self._totals}
        for pending in self._pending.values():
            by_namespace[pending.namespace_id].append(pending)
        return {
            namespace_id: ReplicationReport(
                lag_blocks=sum(each.num_blocks for each in chains),
                lag_bytes=sum(each.num_blocks * each.block_bytes for each in chains),
                lag_s=max((now_s - each.since_s for each in chains), default=0.0),
                copied_blocks=self._totals[namespace_id].copied_blocks,
                copied_bytes=self._totals[namespace_id].copied_bytes,
                dropped_blocks=self._totals[namespace_id].dropped_blocks,
            )
            for namespace_id, chains in by_namespace.items()
        }

    def check_integrity(self) -> None:
        """Raises IntegrityError when a chain is filed under another block than its last, or misses nothing."""
        for tip, pending in self._pending.items():
            if pending.tip != tip or pending.num_blocks < 1:
                raise IntegrityError(f"a pending chain of {pending.namespace_id} is filed wrongly or misses nothing")
        if len(self._pending) > self._max_chains:
            raise IntegrityError("more chains are pending than may be")


class Pace:
    """Keeps what is copied below a rate."""

    def __init__(self, max_bytes_per_s: float) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._free_s = 0.0

    def spend(self, num_bytes: int, now_s: float) -> None:
        """So much was copied up to now."""
        self._free_s = max(self._free_s, now_s) + num_bytes / self._max_bytes_per_s

    def wait_s(self, now_s: float) -> float:
        """How long to wait before anything more."""
        return max(0.0, self._free_s - now_s)


def backup_of(chain: Chain, pools: Iterable[PoolId]) -> PoolId | None:
    """Which of these pools, all on other nodes, takes the chain's copy; None if there are none."""
    key = affinity_key(chain.namespace_id, chain.hashes)
    return max(pools, key=lambda pool_id: (rendezvous_score(key, pool_id), pool_id), default=None)
