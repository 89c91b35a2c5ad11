"""Namespaces: what each may hold, what it holds, and what is borrowed.

    0 ........ guaranteed ................ limit
    |--- own ---|------- borrowed ------->|

`held` is used (referenced) plus cached bytes. What a namespace holds above its guarantee is borrowed: its cached part
is revoked when another namespace below its guarantee, or a borrower with a better claim by weight, needs it. Cached
blocks of a namespace within its guarantee are never taken for somebody else's borrowing.

Namespaces form a tree by their names: `codegen/team-a` is a child of `codegen`. A limit and a guarantee count what all
descendants hold too; guarantees of children are parts of their parent's. What a parent's guarantee leaves over is for
whoever of the tree needs it: nobody outside can take it. Inside the tree, and at its top, the same rules hold between
siblings: who borrows most for its weight gives first and is served last.

A guarantee is a promise about extents, because memory moves between geometries in extents: G bytes buy the blocks of
G // extent_bytes whole extents and those that fit the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from remora.namespaces.adviser import CapacityAdviser
from remora.namespaces.commands import SetQuota
from remora.namespaces.eviction import EvictionPolicy
from remora.namespaces.extents import ExtentMap, GeometrySpace
from remora.namespaces.geometry import KVPrecision
from remora.namespaces.hashing import sharing_domain
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import ModelId, NamespaceId
from remora.platform.base.namespace_tree import parent_of


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

    __slots__ = ("adviser", "cached_bytes", "children", "domain", "evicted_blocks", "guaranteed_bytes", "hit_tokens",
                 "holdings", "kv_precision", "lookup_tokens", "model_id", "namespace_id", "num_admitted",
                 "num_preempted", "order", "parent", "quota", "share_group", "tenant", "tree_cached_bytes",
                 "tree_used_bytes", "used_bytes")  # fmt: skip

    def __init__(self, order: int, command: SetQuota, domain: int) -> None:
        self.order = order
        self.namespace_id = command.namespace_id
        self.model_id = command.model_id
        self.tenant = command.tenant
        self.share_group = command.share_group
        #: Number of the sharing domain; see QuotaBook.domains.
        self.domain = domain
        self.quota = command.quota
        #: None: the model's. Only that of a root counts.
        self.kv_precision = command.kv_precision
        self.parent: Namespace | None = None
        self.children: list[Namespace] = []
        #: The guarantee in whole blocks of its geometry; what it holds below includes the children's.
        self.guaranteed_bytes = 0
        self.holdings: dict[str, Holding] = {}
        self.used_bytes = 0
        self.cached_bytes = 0
        #: The same with all descendants'.
        self.tree_used_bytes = 0
        self.tree_cached_bytes = 0
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
    def tree_held_bytes(self) -> int:
        return self.tree_used_bytes + self.tree_cached_bytes

    @property
    def borrowed_bytes(self) -> int:
        return max(0, self.tree_held_bytes - self.guaranteed_bytes)

    def charge(self, used_bytes: int, cached_bytes: int) -> None:
        """Adds to what it holds, and to what every namespace above it holds."""
        self.used_bytes += used_bytes
        self.cached_bytes += cached_bytes
        account: Namespace | None = self
        while account is not None:
            account.tree_used_bytes += used_bytes
            account.tree_cached_bytes += cached_bytes
            account = account.parent

    def lineage(self) -> Iterator[Namespace]:
        """Itself, its parent, and so on to the root."""
        account: Namespace | None = self
        while account is not None:
            yield account
            account = account.parent

    def path(self) -> list[Namespace]:
        """From the root down to itself."""
        return [*self.lineage()][::-1]

    def contains(self, other: Namespace) -> bool:
        """Whether the other is this one or below it."""
        account: Namespace | None = other
        while account is not None and account is not self:
            account = account.parent
        return account is not None

    def accounts_against(self, asker: Namespace) -> list[Namespace]:
        """Those of its lineage that do not contain the asker: it cannot claim what any of them is guaranteed."""
        found: list[Namespace] = []
        account: Namespace | None = self
        while account is not None and not account.contains(asker):
            found.append(account)
            account = account.parent
        return found

    def may_be_preempted_for(self, asker: Namespace) -> bool:
        """Whether its running sequences use what is guaranteed to nobody the asker is no part of."""
        return all(a.tree_used_bytes > a.guaranteed_bytes for a in self.accounts_against(asker))

    def entitlement(self, num_bytes: int) -> Namespace | None:
        """The closest of its lineage whose guarantee covers what it uses and so much more."""
        return next((a for a in self.lineage() if a.tree_used_bytes + num_bytes <= a.guaranteed_bytes), None)

    def bytes_above_limit(self, num_bytes: int) -> tuple[int, Namespace]:
        """What would be used above a limit of its lineage with so much more, and whose limit that is."""
        above = [(a.tree_used_bytes + num_bytes - a.quota.limit_bytes, a) for a in self.lineage()]
        return max(above, key=lambda pair: pair[0])

    def standing(self) -> tuple[float, ...]:
        """Who waits with the least goes next: what each of its path uses above its guarantee, over its weight."""
        found = [(a.tree_used_bytes - a.guaranteed_bytes) / a.quota.weight for a in self.path()]
        if self.children:  # beside them, its own requests are a child without a guarantee, of weight 1
            found.append(float(self.used_bytes))
        return tuple(found)

    def held_blocks(self, space: GeometrySpace) -> int:
        """Blocks of the geometry that it and its descendants hold."""
        holding = self.holdings.get(space.geometry_id)
        own = holding.held_blocks if holding is not None else 0
        return own + sum(child.held_blocks(space) for child in self.children)


class QuotaBook:
    """All namespaces of a pool and the arithmetic of their guarantees."""

    def __init__(self, extents: ExtentMap) -> None:
        self.num_extents = len(extents.extents)
        self.extent_bytes = extents.extent_bytes
        self._spaces = extents.spaces
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
        self._link()
        return namespace

    def _link(self) -> None:
        """Builds the tree anew."""
        for namespace in self.namespaces.values():
            parent_id = parent_of(namespace.namespace_id, self.namespaces)
            namespace.parent = self.namespaces[parent_id] if parent_id is not None else None
            namespace.children = []
            namespace.tree_used_bytes = namespace.tree_cached_bytes = 0
        for namespace in self.namespaces.values():
            if namespace.parent is not None:
                namespace.parent.children.append(namespace)
            for account in namespace.lineage():
                account.tree_used_bytes += namespace.used_bytes
                account.tree_cached_bytes += namespace.cached_bytes

    def space_of(self, namespace: Namespace) -> GeometrySpace | None:
        """The geometry that its guarantee is counted in: that of its tree's precision, once a replica has it. None:
        no replica of its model has attached."""
        root = namespace.path()[0]
        return self._space_of(root.model_id, root.kv_precision)

    def _space_of(
        self,
        model_id: ModelId,
        kv_precision: KVPrecision | None,
        attached: GeometrySpace | None = None,
        added: GeometrySpace | None = None,
    ) -> GeometrySpace | None:
        """`attached` takes the place of the model's own geometry, `added` is one more."""
        own = attached or self.model_spaces.get(model_id)
        if own is None or kv_precision is None:
            return own
        geometry_id = own.geometry.with_precision(kv_precision).geometry_id
        if added is not None and added.geometry_id == geometry_id:
            return added
        return self._spaces.get(geometry_id, own)

    def roots(self) -> list[Namespace]:
        return [namespace for namespace in self.namespaces.values() if namespace.parent is None]

    def tree_problem(self, changed: SetQuota) -> str | None:
        """A sentence when the change contradicts the namespaces above or below it; else None."""
        quotas = {n.namespace_id: (n.model_id, n.quota) for n in self.namespaces.values()}
        quotas[changed.namespace_id] = (changed.model_id, changed.quota)
        promised: dict[NamespaceId, int] = {}
        for name, (model_id, quota) in quotas.items():
            parent = parent_of(name, quotas)
            if parent is None:
                continue
            if quotas[parent][0] != model_id:
                return f"{name!r} is of model {model_id!r}, its parent {parent!r} of {quotas[parent][0]!r}"
            promised[parent] = promised.get(parent, 0) + quota.guaranteed_bytes
        for parent, total in promised.items():
            if total > quotas[parent][1].guaranteed_bytes:
                return (
                    f"the namespaces below {parent!r} are guaranteed {total} bytes, more than its own "
                    f"{quotas[parent][1].guaranteed_bytes}: their guarantees are parts of it"
                )
        return None

    def holdings(self) -> Iterator[Holding]:
        for namespace in self.namespaces.values():
            yield from namespace.holdings.values()

    def extents_short(
        self,
        *,
        changed: SetQuota | None = None,
        model_id: ModelId | None = None,
        attached: GeometrySpace | None = None,
        added: GeometrySpace | None = None,
    ) -> str | None:
        """A sentence when the guarantees, after the given change, need more extents than there are; else None.

        `attached` becomes the model's own geometry, `added` one more that it has.
        """
        quotas = {n.namespace_id: (n.model_id, n.quota, n.kv_precision) for n in self.namespaces.values()}
        if changed is not None:
            quotas[changed.namespace_id] = (changed.model_id, changed.quota, changed.kv_precision)
        totals: dict[str, int] = {}
        unserved = 0  # guarantees of models without a replica so far: they may yet share extents with any other
        for name, (owner, quota, kv_precision) in quotas.items():
            if parent_of(name, quotas) is not None:
                continue  # a part of its parent's
            space = self._space_of(owner, kv_precision, attached if owner == model_id else None, added)
            if space is not None:
                totals[space.geometry_id] = totals.get(space.geometry_id, 0) + quota.guaranteed_bytes
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
        """Recomputes every namespace's guarantee in whole blocks, after a quota, a precision or a geometry changed."""
        by_space: dict[GeometrySpace, list[Namespace]] = {}
        for namespace in self.roots():
            space = self.space_of(namespace)
            if space is None:
                for member in self._subtree(namespace):
                    member.guaranteed_bytes = member.quota.guaranteed_bytes
            else:
                by_space.setdefault(space, []).append(namespace)
        for space, members in by_space.items():
            # Rests of several namespaces that share an extent may add up to a block more than it surely holds.
            total_bytes = sum(namespace.quota.guaranteed_bytes for namespace in members)
            self._guarantee(members, space, -(-total_bytes // self.extent_bytes) * space.min_extent_blocks)

    def _guarantee(self, members: list[Namespace], space: GeometrySpace, most_blocks: int) -> None:
        """Guarantees of siblings and all below them in whole blocks, at most so many together."""
        blocks = []
        for namespace in members:
            whole, rest = divmod(namespace.quota.guaranteed_bytes, self.extent_bytes)
            per_extent = space.min_extent_blocks
            blocks.append(whole * per_extent + min(rest // space.block_bytes, per_extent))
        surplus = sum(blocks) - most_blocks
        for position in range(len(members) - 1, -1, -1):
            trimmed = min(max(surplus, 0), blocks[position])
            blocks[position] -= trimmed
            surplus -= trimmed
        for namespace, num_blocks in zip(members, blocks, strict=True):
            namespace.guaranteed_bytes = num_blocks * space.block_bytes
            self._guarantee(namespace.children, space, num_blocks)

    def _subtree(self, namespace: Namespace) -> Iterator[Namespace]:
        yield namespace
        for child in namespace.children:
            yield from self._subtree(child)

    def protected_extents(self, space: GeometrySpace, *, besides: Namespace) -> int:
        """Extents a geometry needs for what others hold of it and the namespace cannot claim."""
        blocks = self.protected_blocks(space, besides=besides)
        return -(-blocks // space.min_extent_blocks)

    def protected_blocks(self, space: GeometrySpace, *, besides: Namespace) -> int:
        """Blocks of the geometry that are held within guarantees the namespace is no part of."""
        lineage = {*besides.lineage()}
        return sum(_protected(root, space, lineage) for root in self.roots())

    def obtainable_blocks(self, namespace: Namespace, space: GeometrySpace, spaces: Iterator[GeometrySpace]) -> int:
        """Blocks the namespace could hold if it waited until nothing in the pool is referenced."""
        extents = self.num_extents
        for other in spaces:
            if other is not space:
                extents -= self.protected_extents(other, besides=namespace)
        obtainable = extents * space.min_extent_blocks - self.protected_blocks(space, besides=namespace)
        lineage = {*namespace.lineage()}
        for account in lineage:
            by_limit = account.quota.limit_bytes // space.block_bytes
            obtainable = min(obtainable, by_limit - _protected(account, space, lineage))
        return max(0, obtainable)

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
            below = namespace.children
            if (namespace.tree_used_bytes, namespace.tree_cached_bytes) != (
                used + sum(child.tree_used_bytes for child in below),
                cached + sum(child.tree_cached_bytes for child in below),
            ):
                raise IntegrityError(f"namespace {namespace.namespace_id}: bytes are not those of its tree")
            if sum(child.guaranteed_bytes for child in below) > namespace.guaranteed_bytes:
                raise IntegrityError(f"namespace {namespace.namespace_id}: its children are guaranteed more than it is")


def _protected(account: Namespace, space: GeometrySpace, lineage: set[Namespace]) -> int:
    """Blocks of a tree that somebody of this lineage cannot claim."""
    below = sum(_protected(child, space, lineage) for child in account.children)
    if account in lineage:
        return below
    return max(below, min(account.held_blocks(space), account.guaranteed_bytes // space.block_bytes))
