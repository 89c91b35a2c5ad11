"""Namespaces: what each may hold, what it holds, and what is borrowed.

    0 ........ guaranteed ................ limit
    |--- own ---|------- borrowed ------->|

`held` is used (referenced) plus cached bytes. What a namespace holds above its guarantee is borrowed: its cached part
is revoked when another namespace below its guarantee, or a borrower with a better claim by weight, needs it. Cached
blocks of a namespace within its guarantee are never taken for somebody else's borrowing.

A guarantee is a promise about extents, because memory moves between geometries in extents: G bytes buy the blocks of
G // extent_bytes whole extents and those that fit the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from remora.namespaces.adviser import CapacityAdviser
from remora.namespaces.commands import SetQuota
from remora.namespaces.eviction import EvictionPolicy
from remora.namespaces.extents import GeometrySpace
from remora.namespaces.hashing import sharing_domain
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import ModelId, NamespaceId


class Holding:
    """Blocks of one geometry charged to one namespace."""

    __slots__ = ("namespace", "policy", "space", "used_blocks")

    def __init__(self, namespace: Namespace, space: GeometrySpace, policy: EvictionPolicy) -> None:
        self.namespace = namespace
        self.space = space
        #: The cached (sealed, unreferenced) blocks.
        self.policy = policy
        self.used_blocks = 0

    @property
    def held_blocks(self) -> int:
        return self.used_blocks + len(self.policy)


class Namespace:
    """One share of the pool. Bytes are kept by the block ledger, everything else by the QuotaBook."""

    __slots__ = ("adviser", "cached_bytes", "domain", "evicted_blocks", "guaranteed_bytes", "hit_tokens", "holdings",
                 "lookup_tokens", "model_id", "namespace_id", "num_admitted", "num_preempted", "order", "quota",
                 "share_group", "tenant", "used_bytes", "virtual_time")  # fmt: skip

    def __init__(self, order: int, command: SetQuota, domain: int) -> None:
        self.order = order
        self.namespace_id = command.namespace_id
        self.model_id = command.model_id
        self.tenant = command.tenant
        self.share_group = command.share_group
        #: Number of the sharing domain; see QuotaBook.domains.
        self.domain = domain
        self.quota = command.quota
        #: The guarantee in whole blocks of the model's geometry.
        self.guaranteed_bytes = 0
        self.holdings: dict[str, Holding] = {}
        self.used_bytes = 0
        self.cached_bytes = 0
        #: Bytes granted over weight; the namespace with the least is next (namespaces/waiting.py).
        self.virtual_time = 0.0
        self.lookup_tokens = 0
        self.hit_tokens = 0
        self.num_admitted = 0
        self.num_preempted = 0
        #: Blocks evicted, by cause (namespaces/blocks.py).
        self.evicted_blocks: dict[str, int] = {}
        #: What its lookups say about the size it could use.
        self.adviser = CapacityAdviser()

    @property
    def held_bytes(self) -> int:
        return self.used_bytes + self.cached_bytes

    @property
    def borrowed_bytes(self) -> int:
        return max(0, self.held_bytes - self.guaranteed_bytes)

    @property
    def is_borrower(self) -> bool:
        return self.held_bytes > self.guaranteed_bytes

    def protected_blocks(self, holding: Holding) -> int:
        """Blocks of the holding that nobody else can claim."""
        return min(holding.held_blocks, self.guaranteed_bytes // holding.space.block_bytes)


class QuotaBook:
    """All namespaces of a pool and the arithmetic of their guarantees."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self.namespaces: dict[NamespaceId, Namespace] = {}
        #: Sharing domains by name; numbers start at 1.
        self.domains: dict[str, int] = {}
        #: Geometry in which a model's replicas attached last.
        self.model_spaces: dict[ModelId, GeometrySpace] = {}

    def add(self, command: SetQuota) -> Namespace:
        """Creates a namespace; the caller has checked the command."""
        domain_name = sharing_domain(command.namespace_id, command.tenant, command.share_group)
        domain = self.domains.setdefault(domain_name, len(self.domains) + 1)
        namespace = Namespace(len(self.namespaces), command, domain)
        self.namespaces[command.namespace_id] = namespace
        return namespace

    def holdings(self) -> Iterator[Holding]:
        for namespace in self.namespaces.values():
            yield from namespace.holdings.values()

    def extents_short(
        self, *, changed: SetQuota | None = None, model_id: ModelId | None = None, space: GeometrySpace | None = None
    ) -> str | None:
        """A sentence when the guarantees, after the given change, need more extents than there are; else None."""
        quotas = {n.namespace_id: (n.model_id, n.quota) for n in self.namespaces.values()}
        if changed is not None:
            quotas[changed.namespace_id] = (changed.model_id, changed.quota)
        spaces = dict(self.model_spaces)
        if model_id is not None and space is not None:
            spaces[model_id] = space
        totals: dict[str, int] = {}
        unserved = 0  # guarantees of models without a replica so far: they may yet share extents with any other
        for owner, quota in quotas.values():
            if owner in spaces:
                key = spaces[owner].geometry_id
                totals[key] = totals.get(key, 0) + quota.guaranteed_bytes
            else:
                unserved += quota.guaranteed_bytes
        needed = sum(-(-size // self.extent_bytes) for size in totals.values())
        spare = needed * self.extent_bytes - sum(totals.values())
        needed += -(-max(0, unserved - spare) // self.extent_bytes)
        if needed <= self.num_extents:
            return None
        total = sum(totals.values()) + unserved
        return (
            f"guarantees of {total} bytes need {needed} extents of {self.extent_bytes} bytes, the arena has "
            f"{self.num_extents} (each geometry leases whole extents); lower `guaranteed` or enlarge arena_bytes"
        )

    def refresh_guarantees(self) -> None:
        """Recomputes every namespace's guarantee in whole blocks, after a quota or a model's geometry changed."""
        by_space: dict[str, list[Namespace]] = {}
        for namespace in self.namespaces.values():
            space = self.model_spaces.get(namespace.model_id)
            if space is None:
                namespace.guaranteed_bytes = namespace.quota.guaranteed_bytes
            else:
                by_space.setdefault(space.geometry_id, []).append(namespace)
        for members in by_space.values():
            space = self.model_spaces[members[0].model_id]
            per_extent = space.min_extent_blocks
            blocks = []
            for namespace in members:
                whole, rest = divmod(namespace.quota.guaranteed_bytes, self.extent_bytes)
                blocks.append(whole * per_extent + min(rest // space.block_bytes, per_extent))
            # Rests of several namespaces that share an extent may add up to a block more than it surely holds.
            total_bytes = sum(namespace.quota.guaranteed_bytes for namespace in members)
            surplus = sum(blocks) - -(-total_bytes // self.extent_bytes) * per_extent
            for position in range(len(members) - 1, -1, -1):
                trimmed = min(max(surplus, 0), blocks[position])
                blocks[position] -= trimmed
                surplus -= trimmed
            for namespace, num_blocks in zip(members, blocks, strict=True):
                namespace.guaranteed_bytes = num_blocks * space.block_bytes

    def protected_extents(self, space: GeometrySpace, *, besides: Namespace) -> int:
        """Extents a geometry needs for what its namespaces hold within their guarantees."""
        blocks = self.protected_blocks(space, besides=besides)
        return -(-blocks // space.min_extent_blocks)

    def protected_blocks(self, space: GeometrySpace, *, besides: Namespace) -> int:
        total = 0
        for namespace in self.namespaces.values():
            holding = namespace.holdings.get(space.geometry_id)
            if holding is not None and namespace is not besides:
                total += namespace.protected_blocks(holding)
        return total

    def obtainable_blocks(self, namespace: Namespace, space: GeometrySpace, spaces: Iterator[GeometrySpace]) -> int:
        """Blocks the namespace could hold if it waited until nothing in the pool is referenced."""
        extents = self.num_extents
        for other in spaces:
            if other is not space:
                extents -= self.protected_extents(other, besides=namespace)
        by_memory = extents * space.min_extent_blocks - self.protected_blocks(space, besides=namespace)
        return max(0, min(by_memory, namespace.quota.limit_bytes // space.block_bytes))

    def check_integrity(self) -> None:
        """Raises IntegrityError when a namespace's bytes are not those of its holdings or exceed its limit."""
        for namespace in self.namespaces.values():
            namespace.adviser.check_integrity()
            used = cached = 0
            for holding in namespace.holdings.values():
                used += holding.used_blocks * holding.space.block_bytes
                cached += len(holding.policy) * holding.space.block_bytes
            if (used, cached) != (namespace.used_bytes, namespace.cached_bytes):
                raise IntegrityError(f"namespace {namespace.namespace_id}: bytes are not those of its blocks")
