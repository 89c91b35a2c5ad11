"""Where new blocks come from: plan without touching anything, then apply.

In order: free blocks of the geometry; unleased extents and empty ones of other geometries; cached blocks, always from
the namespace that borrows most for its weight; whole extents of other geometries, emptiest first. A plan that does not
reach its goal evicts nothing.

    who may lose cached blocks      to whom
    any namespace                   itself
    a borrower, down to guarantee   everyone
    a namespace in its guarantee    nobody; but a nearly empty extent can be all that stands between another namespace
                                    and memory that is nobody's guarantee. It is taken for a demand within a guarantee,
                                    or when nothing runs that could be waited for (cause "fragmentation")
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from remora.namespaces.blocks import Block, BlockLedger, EvictionCause
from remora.namespaces.extents import Extent, ExtentMap, GeometrySpace
from remora.namespaces.quotas import Holding, Namespace, QuotaBook

#: Extents of one geometry that a plan examines before it gives that geometry up.
_MAX_EXTENT_PROBES = 32


@dataclass(slots=True)
class Plan:
    """Evictions and leases after which the blocks asked for are free."""

    evictions: dict[tuple[int, int, EvictionCause], tuple[Holding, int]] = field(default_factory=dict)
    trees: list[tuple[list[Block], EvictionCause]] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shortage:
    """No plan reaches the goal: what is in the way, and how many blocks are missing."""

    kind: Literal["limit", "memory"]
    num_missing: int


_NOTHING_TO_DO = Plan()


class Placement:
    """Plans grants and carries them out."""

    def __init__(self, extents: ExtentMap, book: QuotaBook, ledger: BlockLedger) -> None:
        self.extents = extents
        self.book = book
        self.ledger = ledger

    def plan(self, namespace: Namespace, space: GeometrySpace, count: int, *, idle: bool) -> Plan | Shortage:
        """How `count` new blocks can be had now. `idle`: nobody but the asker references anything.

        What the asker references already (a matched prefix) is pinned by that.
        """
        size = space.block_bytes
        demand = count * size
        over_limit = namespace.used_bytes + demand - namespace.quota.limit_bytes
        if over_limit > 0:
            return Shortage("limit", -(-over_limit // size))
        if space.num_free >= count and namespace.held_bytes + demand <= namespace.quota.limit_bytes:
            return _NOTHING_TO_DO
        return _Sketch(self, namespace, space, count).draw(idle=idle)

    def apply(self, plan: Plan, space: GeometrySpace) -> None:
        """Evicts and leases as planned."""
        for (_, _, cause), (holding, count) in plan.evictions.items():
            for _ in range(count):
                self.ledger.evict_first(holding, cause)
        for blocks, cause in plan.trees:
            self.ledger.evict_trees(blocks, cause)
        for extent in plan.extents:
            self.extents.lease(extent, space)

    def trim(self, namespace: Namespace) -> int:
        """Evicts cached blocks until the namespace is within its limit, as far as they go. Returns the bytes."""
        before = namespace.held_bytes
        for holding in sorted(namespace.holdings.values(), key=lambda holding: holding.space.order):
            while len(holding.policy) and namespace.held_bytes > namespace.quota.limit_bytes:
                self.ledger.evict_first(holding, "quota")
        return before - namespace.held_bytes


class _Sketch:
    """A plan in the making: simulated holdings on top of the real ones."""

    def __init__(self, placement: Placement, namespace: Namespace, space: GeometrySpace, count: int) -> None:
        self.extents = placement.extents
        self.book = placement.book
        self.namespace = namespace
        self.space = space
        self.demand_bytes = count * space.block_bytes
        self.missing = count - space.num_free
        self.plan = Plan()
        #: Bytes planned away, by namespace order; the asker's demand counts as held.
        self._lost_bytes: dict[int, int] = {namespace.order: -self.demand_bytes}
        #: Cached blocks planned away, by (namespace order, space order).
        self._taken: dict[tuple[int, int], int] = {}
        self._doomed: set[Block] = set()
        self._emptiest: dict[int, Iterator[Extent]] = {}
        self._planned_extents: dict[int, int] = {}

    def draw(self, *, idle: bool) -> Plan | Shortage:
        self._stay_within_limit()
        self._take_empty_extents()
        self._take_from_borrowers()
        if self.missing > 0:
            entitled = self.namespace.used_bytes + self.demand_bytes <= self.namespace.guaranteed_bytes
            if entitled or idle:
                self._take_fragmented_extents()
        return self.plan if self.missing <= 0 else Shortage("memory", self.missing)

    def _stay_within_limit(self) -> None:
        """The asker's own cache makes room below its limit, in this geometry first."""
        surplus = self.namespace.held_bytes + self.demand_bytes - self.namespace.quota.limit_bytes
        own = sorted(self.namespace.holdings.values(), key=lambda h: (h.space is not self.space, h.space.order))
        for holding in own:
            count = min(len(holding.policy), -(-surplus // holding.space.block_bytes))
            if count > 0:
                self._take(holding, count, "limit")
                surplus -= count * holding.space.block_bytes

    def _take(self, holding: Holding, count: int, cause: EvictionCause) -> None:
        place = (holding.namespace.order, holding.space.order)
        self._taken[place] = self._taken.get(place, 0) + count
        self._lose(holding.namespace, count * holding.space.block_bytes)
        _, planned = self.plan.evictions.get((*place, cause), (holding, 0))
        self.plan.evictions[(*place, cause)] = (holding, planned + count)
        if holding.space is self.space:
            self.missing -= count

    def _lose(self, namespace: Namespace, num_bytes: int) -> None:
        self._lost_bytes[namespace.order] = self._lost_bytes.get(namespace.order, 0) + num_bytes

    def _lease(self, extent: Extent) -> None:
        self.plan.extents.append(extent)
        self.missing -= self.space.blocks_in(extent)
        if extent.space is not None:
            order = extent.space.order
            self._planned_extents[order] = self._planned_extents.get(order, 0) + 1

    def _take_empty_extents(self) -> None:
        if self.missing <= 0:
            return
        others = (space.empty_extents() for space in self.extents.spaces.values() if space is not self.space)
        for extent in chain(self.extents.unleased(), chain.from_iterable(others)):
            self._lease(extent)
            if self.missing <= 0:
                return

    def _excess(self, namespace: Namespace) -> int:
        return namespace.held_bytes - self._lost_bytes.get(namespace.order, 0) - namespace.guaranteed_bytes

    def _rank(self, holding: Holding) -> tuple[int, float] | None:
        """Who gives next, least first; None: this holding has nothing to give."""
        namespace = holding.namespace
        taken = self._taken.get((namespace.order, holding.space.order), 0)
        if len(holding.policy) <= taken:
            return None
        excess = self._excess(namespace)
        if namespace is self.namespace and excess <= 0:
            return (1, 0.0)
        if namespace is not self.namespace and excess < holding.space.block_bytes:
            return None
        if holding.space is not self.space:
            excess -= self.extents.extent_bytes  # another geometry gives a whole extent at once
        return (0, -excess / namespace.quota.weight)

    def _take_from_borrowers(self) -> None:
        if self.missing <= 0:
            return
        heap: list[tuple[tuple[int, float], int, int, Holding]] = []
        for holding in self.book.holdings():
            rank = self._rank(holding)
            if rank is not None:
                heap.append((rank, holding.namespace.order, holding.space.order, holding))
        heapq.heapify(heap)
        while self.missing > 0 and heap:
            rank, order, space_order, holding = heap[0]
            fresh = self._rank(holding)
            if fresh is None:
                heapq.heappop(heap)
            elif fresh != rank:
                heapq.heapreplace(heap, (fresh, order, space_order, holding))
            elif holding.space is self.space:
                next_rank = min((entry[0] for entry in heap[1:3]), default=(2, 0.0))
                count = self._turn(holding, rank, next_rank)
                self._take(holding, count, "own" if holding.namespace is self.namespace else "borrowed")
            elif not self._take_extent(holding.space):
                heapq.heappop(heap)

    def _turn(self, holding: Holding, rank: tuple[int, float], next_rank: tuple[int, float]) -> int:
        """Blocks of this geometry to take from a holding in one go: until it is no longer its turn."""
        namespace, size = holding.namespace, self.space.block_bytes
        available = len(holding.policy) - self._taken.get((namespace.order, holding.space.order), 0)
        count = min(self.missing, available)
        if rank[0] == 0:
            floor = -next_rank[1] * namespace.quota.weight if next_rank[0] == 0 else 0.0
            count = min(count, int((self._excess(namespace) - floor) // size))
        return max(1, count)

    def _take_extent(self, space: GeometrySpace) -> bool:
        """Plans to clear the emptiest extent of another geometry whose owners can all spare what it holds."""
        emptiest = self._emptiest.get(space.order)
        if emptiest is None:
            emptiest = self._emptiest[space.order] = iter(list(space.emptiest_extents())[:_MAX_EXTENT_PROBES])
        for extent in emptiest:
            tree = self._tree(extent)
            lost: dict[int, tuple[Namespace, int]] = {}
            for block in tree:
                owner = block.holding.namespace
                lost[owner.order] = (owner, lost.get(owner.order, (owner, 0))[1] + space.block_bytes)
            if all(owner is self.namespace or self._excess(owner) >= size for owner, size in lost.values()):
                self._clear(extent, tree, "extent")
                return True
        return False

    def _tree(self, extent: Extent) -> list[Block]:
        """The extent's blocks and all their descendants that are not planned away yet. None of them is referenced."""
        found: list[Block] = []
        seen: set[Block] = set()
        stack = list(extent.blocks.values())
        while stack:
            block = stack.pop()
            if block not in seen and block not in self._doomed:
                seen.add(block)
                found.append(block)
                if block.children:
                    stack.extend(block.children.values())
        return found

    def _clear(self, extent: Extent, tree: list[Block], cause: EvictionCause) -> None:
        for block in tree:
            self._doomed.add(block)
            self._lose(block.holding.namespace, block.holding.space.block_bytes)
            place = (block.holding.namespace.order, block.holding.space.order)
            self._taken[place] = self._taken.get(place, 0) + 1
        self.plan.trees.append((tree, cause))
        self._lease(extent)

    def _take_fragmented_extents(self) -> None:
        """Geometries that spread what is guaranteed over more extents than it needs give up the emptiest."""
        for space in self.extents.spaces.values():
            if space is self.space:
                continue
            spare = len(space.extents) - self._planned_extents.get(space.order, 0)
            spare -= self.book.protected_extents(space, besides=self.namespace)
            planned = {extent.index for extent in self.plan.extents}
            for extent in space.emptiest_extents():
                if spare <= 0 or self.missing <= 0:
                    break
                if extent.index not in planned:
                    self._clear(extent, self._tree(extent), "fragmentation")
                    spare -= 1
