"""Replays a trace against an eviction policy: the ledger, the index and the policy are the pool's own.

Requests come one after another. A hit is a block of the longest cached prefix, as in a pool; what is missing is
computed and cached, and what is not needed any more is released tail first. The optimum knows the future (Belady):
after each request it keeps the blocks whose next use is nearest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import msgspec

from remora.namespaces.blocks import BlockLedger
from remora.namespaces.commands import Quota, SetQuota
from remora.namespaces.eviction import POLICY_NAMES
from remora.namespaces.extents import ExtentMap
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.prefix_index import PrefixIndex, RealmKey
from remora.namespaces.quotas import QuotaBook
from remora.namespaces.trace import TraceRequest
from remora.platform.base.errors import ConfigError
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId

#: Name of the policy that knows the future.
OPTIMUM = "optimum"

_EXTENT_BLOCKS = 128
_GEOMETRY = KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=1)


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks looked up and found, in all and by priority of the request."""

    policy: str
    capacity_blocks: int
    num_lookups: int
    num_hits: int
    lookups_by_priority: dict[int, int]
    hits_by_priority: dict[int, int]

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0


def parse_capacity(text: str, num_unique_blocks: int) -> int:
    """Blocks from "10%" of the unique blocks or a number of blocks. Raises ConfigError when it is neither."""
    try:
        share = text.strip().endswith("%")
        blocks = int(num_unique_blocks * float(text.strip()[:-1]) / 100) if share else int(text)
    except (ValueError, OverflowError):
        blocks = 0
    if blocks < 1:
        raise ConfigError(f"capacity: {text!r} is not allowed; one block or more, or a share of all such as 10%")
    return blocks


def check_policy(name: str) -> None:
    """Raises ConfigError for a policy that cannot be replayed."""
    if name != OPTIMUM and name not in POLICY_NAMES:
        raise ConfigError(f"policy: {name!r} is not allowed; one of {[*POLICY_NAMES, OPTIMUM]}")


def replay(trace: Sequence[TraceRequest], policy: str, capacity_blocks: int) -> ReplayResult:
    """Hits of a trace in a cache of so many blocks. Raises ConfigError for an unknown policy."""
    check_policy(policy)
    hits = _replay_optimum(trace, capacity_blocks) if policy == OPTIMUM else _replay(trace, policy, capacity_blocks)
    lookups_by: dict[int, int] = {}
    hits_by: dict[int, int] = {}
    for request, num_hits in zip(trace, hits, strict=True):
        lookups_by[request.priority] = lookups_by.get(request.priority, 0) + len(request.hash_ids)
        hits_by[request.priority] = hits_by.get(request.priority, 0) + num_hits
    return ReplayResult(
        policy=policy,
        capacity_blocks=capacity_blocks,
        num_lookups=sum(lookups_by.values()),
        num_hits=sum(hits_by.values()),
        lookups_by_priority=lookups_by,
        hits_by_priority=hits_by,
    )


def _replay(trace: Sequence[TraceRequest], policy: str, capacity_blocks: int) -> Iterator[int]:
    """Hits of each request."""
    extent_bytes = _EXTENT_BLOCKS * _GEOMETRY.block_bytes
    extents = ExtentMap(-(-capacity_blocks // _EXTENT_BLOCKS) * extent_bytes, extent_bytes)
    space = extents.space_of(_GEOMETRY)
    for extent in extents.extents:
        extents.lease(extent, space)
    ledger = BlockLedger(PrefixIndex(), QuotaBook(extents), policy)
    quota = Quota(guaranteed_bytes=0, limit_bytes=1 << 62)
    owner = SetQuota(lease_id=LeaseId(""), namespace_id=NamespaceId("trace"), model_id=ModelId("trace"), quota=quota)
    namespace = ledger.book.add(owner)
    holding = ledger.holding(namespace, space)
    realm = ledger.index.realm(RealmKey(space.geometry_id, b"", namespace.domain))
    for request in trace:
        hashes = request.hashes()[:capacity_blocks]
        blocks = PrefixIndex.match(realm, hashes, len(hashes))
        num_hits = len(blocks)
        for block in blocks:
            ledger.acquire(block)
            holding.policy.hit(block)
        num_new = len(hashes) - num_hits
        while space.num_used + num_new > capacity_blocks:
            ledger.evict_first(holding, "own")
        for block, block_hash in zip(ledger.grant(namespace, space, num_new), hashes[num_hits:], strict=True):
            ledger.seal(block, realm, block_hash, blocks[-1] if blocks else None)
            blocks.append(block)
        for block in reversed(blocks):
            block.level = request.priority
            ledger.drop(block)
        if request.ends_session and blocks:
            ledger.retire(blocks[-1])
        ledger.effects.clear()
        yield num_hits


def _replay_optimum(trace: Sequence[TraceRequest], capacity_blocks: int) -> Iterator[int]:
    """Hits of each request when the block whose next use is farthest goes first; new blocks may go at once."""
    never = len(trace)
    next_use: list[list[int]] = []
    upcoming: dict[int, int] = {}
    for number in range(len(trace) - 1, -1, -1):
        hash_ids = trace[number].hash_ids
        next_use.append([upcoming.get(hash_id, never) for hash_id in hash_ids])
        upcoming.update(dict.fromkeys(hash_ids, number))
    next_use.reverse()
    cached: dict[int, int] = {}
    #: (-next use, -position, id), farthest first and children before parents; an entry counts while it is current.
    farthest: list[tuple[int, int, int]] = []
    for request, uses in zip(trace, next_use, strict=True):
        num_hits = 0
        for hash_id in request.hash_ids:
            if hash_id not in cached:
                break
            num_hits += 1
        for position, (hash_id, use) in enumerate(zip(request.hash_ids, uses, strict=True)):
            cached[hash_id] = use
            heapq.heappush(farthest, (-use, -position, hash_id))
        while len(cached) > capacity_blocks:
            use, _, hash_id = heapq.heappop(farthest)
            if cached.get(hash_id) == -use:
                del cached[hash_id]
        yield num_hits
