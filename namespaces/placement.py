"""Where new blocks come from: plan without touching anything, then apply.

In order: free blocks of the geometry; unleased extents and empty ones of other geometries; cached blocks, always from
the namespace that borrows most for its weight; whole extents of other geometries, emptiest first. A plan that does not
reach its goal evicts nothing.

    who may lose cached blocks      to whom
    any namespace                   itself
    a borrower, down to guarantee   everyone
    a namespace in its guarantee    nobody

A geometry that spreads what is guaranteed over more extents than it needs moves it together (namespaces/compaction.py
does the same on demand).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from remora.namespaces.blocks import Block, BlockLedger, EvictionCause
from remora.namespaces.commands import Taken
from remora.namespaces.extents import Extent, ExtentMap, GeometrySpace
from remora.namespaces.quotas import Holding, Namespace, QuotaBook
from remora.platform.base.errors import IntegrityError

#: Extents of one geometry that a plan examines before it gives that geometry up.
_MAX_EXTENT_PROBES = 32


@dataclass(slots=True)
class Plan:
    """Evictions and leases after which the blocks asked for are free."""

    evictions: dict[tuple[int, int, EvictionCause], tuple[Holding, int]] = field(default_factory=dict)
    trees: list[tuple[list[Block], EvictionCause]] = field(default_factory=list)
    #: Extents whose blocks move to other extents of their geometry.
    vacated: list[Extent] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)

    def taken(self, namespace: Namespace, borrowed_bytes: int) -> Taken | None:
        """What was evicted for it, and by how much the namespace borrows more than the `borrowed_bytes` before; None:
        neither. What has no guarantee borrows all it has: that is not worth a word."""
        counts: dict[str, int] = {}
        for (_, _, cause), (_, count) in self.evictions.items():
            counts[cause] = counts.get(cause, 0) + count
        for blocks, cause in self.trees:
            counts[cause] = counts.get(cause, 0) + len(blocks)
        more_bytes = max(0, namespace.borrowed_bytes - borrowed_bytes) if namespace.guaranteed_bytes else 0
        if not counts and not more_bytes:
            return None
        return Taken(evicted_blocks=tuple(sorted(counts.items())), borrowed_bytes=more_bytes)


@dataclass(frozen=True, slots=True)
class Shortage:
    """No plan reaches the goal: what is in the way, and how many blocks are missing."""

    kind: Literal["limit", "memory"]
    num_missing: int
    #: Whose limit it is: the asker, or a namespace above it.
    account: Namespace | None = None


_NOTHING_TO_DO = Plan()
Rank = tuple[float, ...]


class Placement:
    """Plans grants and carries them out."""

    def __init__(self, extents: ExtentMap, book: QuotaBook, ledger: BlockLedger) -> None:
        self.extents = extents
        self.book = book
        self.ledger = ledger

    def plan(self, namespace: Namespace, space: GeometrySpace, count: int) -> Plan | Shortage:
        """How `count` new blocks can be had now.

        What the asker references already (a matched prefix) is pinned by that.
        """
        demand = count * space.block_bytes
        over_limit, account = namespace.bytes_above_limit(demand)
        if over_limit > 0:
            return Shortage("limit", -(-over_limit // space.block_bytes), account)
        if space.num_free >= count and all(
            account.tree_held_bytes + demand <= account.quota.limit_bytes for account in namespace.lineage()
        ):
            return _NOTHING_TO_DO
        return _Sketch(self, namespace, space, count).draw()

    def apply(self, plan: Plan, space: GeometrySpace) -> None:
        """Evicts and leases as planned."""
        for blocks, cause in plan.trees:
            self.ledger.evict_trees(blocks, cause)
        for (_, _, cause), (holding, count) in plan.evictions.items():
            # What was to go for a limit may have been in a tree that has gone: that counts for the limit as well.
            for _ in range(min(count, len(holding.policy))):
                self.ledger.evict_first(holding, cause)
        for extent in plan.vacated:
            self.vacate(extent, {each.index for each in plan.extents})
        for extent in plan.extents:
            self.extents.lease(extent, space)

    def vacate(self, extent: Extent, kept: set[int]) -> int:
        """Moves the unreferenced blocks of an extent to extents of their geometry other than those. Returns how many.
        Raises IntegrityError when there is no room."""
        space = extent.space
        if space is None:
            raise IntegrityError(f"extent {extent.index} belongs to no geometry")
        pairs: list[tuple[int, int]] = []
        for block in sorted((b for b in extent.blocks.values() if not b.refs), key=lambda each: each.index):
            place = space.take_outside(kept | {extent.index})
            if place is None:
                raise IntegrityError(f"no room was planned for the blocks of extent {extent.index}")
            pairs.append((block.index, place[1]))
            self.ledger.relocate(block, *place)
        self.ledger.copy(space, pairs)
        return len(pairs)

    def give_up(self, namespace: Namespace, space: GeometrySpace, other: GeometrySpace, count: int) -> bool:
        """Evicts cached blocks of another geometry that the namespace can claim for its own; so many, or none."""
        sketch = _Sketch(self, namespace, space, 0)
        if not sketch.spare_blocks(other, count):
            return False
        self.apply(sketch.plan, space)
        return True

    def trim(self, namespace: Namespace, target_bytes: int) -> int:
        """Evicts cached blocks until the namespace with all below it holds no more than that, as far as they go: its
        own first, then those of descendants, of nobody within its guarantee. Returns the bytes."""
        before = namespace.tree_held_bytes
        while namespace.tree_cached_bytes and namespace.tree_held_bytes > target_bytes:
            giver = self.giver_below(namespace)
            if giver is None:
                break
            holding = min((h for h in giver.holdings.values() if len(h.policy)), key=lambda each: each.space.order)
            self.ledger.evict_first(holding, "quota")
        return before - namespace.tree_held_bytes

    def giver_below(self, account: Namespace) -> Namespace | None:
        """Who loses a cached block next in a tree that has to shrink."""
        if account.cached_bytes:
            return account
        borrowing = [c for c in account.children if c.tree_cached_bytes and c.tree_held_bytes > c.guaranteed_bytes]
        for child in sorted(borrowing, key=lambda c: (c.guaranteed_bytes - c.tree_held_bytes) / c.quota.weight):
            giver = self.giver_below(child)
            if giver is not None:
                return giver
        return None


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
        #: Bytes planned away of each account and all below it; the asker's demand counts as held.
        self._lost_bytes: dict[Namespace, int] = dict.fromkeys(namespace.lineage(), -self.demand_bytes)
        #: Cached blocks planned away, by (namespace order, space order).
        self._taken: dict[tuple[int, int], int] = {}
        self._doomed: set[Block] = set()
        self._emptiest: dict[int, Iterator[Extent]] = {}
        self._planned_extents: dict[int, int] = {}

    def draw(self) -> Plan | Shortage:
        short = self._stay_within_limits()
        if short is not None:
            return short
        self._take_empty_extents()
        self._take_from_borrowers()
        if self.missing > 0:
            self._take_fragmented_extents()
        return self.plan if self.missing <= 0 else Shortage("memory", self.missing)

    def _stay_within_limits(self) -> Shortage | None:
        """The cache below each limit makes room: the asker's own first, in this geometry first, then whatever of the
        tree the asker can claim."""
        for account in self.namespace.lineage():
            surplus = account.tree_held_bytes - self._lost_bytes[account] - account.quota.limit_bytes
            if surplus <= 0:
                continue
            own = sorted(self.namespace.holdings.values(), key=lambda h: (h.space is not self.space, h.space.order))
            for holding in own:
                surplus -= self._take_bytes(holding, surplus)
            if surplus > 0 and account.children:
                surplus = self._shrink(account, surplus)
            if surplus > 0:
                return Shortage("limit", -(-surplus // self.space.block_bytes), account)
        return None

    def _take_bytes(self, holding: Holding, num_bytes: int) -> int:
        """Takes cached blocks of the holding, at least so many bytes of them if it has so many. Returns the bytes."""
        taken = self._taken.get((holding.namespace.order, holding.space.order), 0)
        count = min(len(holding.policy) - taken, -(-num_bytes // holding.space.block_bytes))
        if count > 0:
            self._take(holding, count, "limit")
        return max(0, count) * holding.space.block_bytes

    def _shrink(self, account: Namespace, surplus: int) -> int:
        """Takes what the asker can claim of a tree, from who borrows most for its weight. Returns what is left."""
        while surplus > 0:
            ranked = [(rank, h.namespace.order, h.space.order, h) for h in self.book.holdings()
                      if account in h.namespace.lineage() and (rank := self._rank(h)) is not None]  # fmt: skip
            if not ranked:
                return surplus
            holding = min(ranked)[3]
            self._take(holding, 1, "limit")
            surplus -= holding.space.block_bytes
        return surplus

    def _take(self, holding: Holding, count: int, cause: EvictionCause) -> None:
        place = (holding.namespace.order, holding.space.order)
        self._taken[place] = self._taken.get(place, 0) + count
        self._lose(holding.namespace, count * holding.space.block_bytes)
        _, planned = self.plan.evictions.get((*place, cause), (holding, 0))
        self.plan.evictions[(*place, cause)] = (holding, planned + count)
        if holding.space is self.space:
            self.missing -= count

    def _lose(self, namespace: Namespace, num_bytes: int) -> None:
        for account in namespace.lineage():
            self._lost_bytes[account] = self._lost_bytes.get(account, 0) + num_bytes

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

    def _excess(self, account: Namespace) -> int:
        return account.tree_held_bytes - self._lost_bytes.get(account, 0) - account.guaranteed_bytes

    def _can_spare(self, owner: Namespace, num_bytes: int) -> bool:
        return all(self._excess(account) >= num_bytes for account in owner.accounts_against(self.namespace))

    def _rank(self, holding: Holding) -> Rank | None:
        """Who gives next, least first: by what trees borrow for their weight, then their branches, and so on down.
        None: this holding has nothing to give. The asker gives even within its guarantee, after all others."""
        namespace = holding.namespace
        if len(holding.policy) <= self._taken.get((namespace.order, holding.space.order), 0):
            return None
        # Another geometry gives a whole extent at once.
        unit = self.extents.extent_bytes if holding.space is not self.space else 0
        if namespace.parent is None and not namespace.children:  # as below, for the many that are no tree
            excess = self._excess(namespace)
            if namespace is not self.namespace and excess < holding.space.block_bytes:
                return None
            return ((unit - excess) / namespace.quota.weight,)
        if not self._can_spare(namespace, holding.space.block_bytes):
            return None
        rank = tuple([(unit - self._excess(account)) / account.quota.weight for account in namespace.path()])
        return (*rank, float(unit - namespace.held_bytes)) if namespace.children else rank

    def _take_from_borrowers(self) -> None:
        if self.missing <= 0:
            return
        heap: list[tuple[Rank, int, int, Holding]] = []
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
                next_rank = min((entry[0] for entry in heap[1:3]), default=())
                count = self._turn(holding, rank, next_rank)
                self._take(holding, count, "own" if holding.namespace is self.namespace else "borrowed")
            elif not self._take_extent(holding.space):
                heapq.heappop(heap)

    def _turn(self, holding: Holding, rank: Rank, next_rank: Rank) -> int:
        """Blocks of this geometry to take from a holding in one go: until it is no longer its turn."""
        namespace, size = holding.namespace, self.space.block_bytes
        count = min(
            self.missing, len(holding.policy) - self._taken.get((namespace.order, holding.space.order), 0),
            *(self._excess(account) // size for account in namespace.accounts_against(self.namespace)),
        )  # fmt: skip
        if next_rank:
            levels = zip(namespace.path(), rank, next_rank, strict=False)
            ahead = next(((other - own) * a.quota.weight for a, own, other in levels if own != other), 0.0)
            count = min(count, int(ahead // size))
        return max(1, count)

    def _take_extent(self, space: GeometrySpace) -> bool:
        """Plans to clear the emptiest extent of another geometry whose owners can all spare what it holds."""
        emptiest = self._emptiest.get(space.order)
        if emptiest is None:
            emptiest = self._emptiest[space.order] = iter(list(space.emptiest_extents())[:_MAX_EXTENT_PROBES])
        for extent in emptiest:
            tree = self._tree(extent)
            lost: dict[Namespace, int] = {}
            for block in tree:
                for account in block.holding.namespace.accounts_against(self.namespace):
                    lost[account] = lost.get(account, 0) + space.block_bytes
            if all(self._excess(account) >= size for account, size in lost.items()):
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
        """Geometries that spread what is guaranteed over more extents than it needs move it together. What can be
        spared of them goes where there is no room for all."""
        for space in self.extents.spaces.values():
            if space is self.space:
                continue
            spare = len(space.extents) - self._planned_extents.get(space.order, 0)
            spare -= self.book.protected_extents(space, besides=self.namespace)
            planned = {extent.index for extent in self.plan.extents}
            left = {e: sum(block not in self._doomed for block in e.blocks.values())
                    for e in space.extents.values() if e.index not in planned}  # fmt: skip
            free = sum(extent.num_blocks - len(extent.moving) - count for extent, count in left.items())
            for extent in sorted((e for e in left if e.is_movable), key=lambda e: (left[e], e.index)):
                if spare <= 0 or self.missing <= 0:
                    break
                needed = left[extent] - (free - (extent.num_blocks - left[extent]))
                if needed > 0 and not self.spare_blocks(space, needed):
                    break
                self.plan.vacated.append(extent)
                self._lease(extent)
                free -= extent.num_blocks - max(0, needed)
                spare -= 1

    def spare_blocks(self, space: GeometrySpace, count: int) -> bool:
        """Plans to evict cached blocks of another geometry that the asker can claim, all or none."""
        chosen: list[tuple[Holding, int]] = []
        for holding in self.book.holdings():
            if holding.space is not space or count <= 0:
                continue
            taken = self._taken.get((holding.namespace.order, space.order), 0)
            accounts = holding.namespace.accounts_against(self.namespace)
            number = min(
                [len(holding.policy) - taken, count, *(self._excess(a) // space.block_bytes for a in accounts)]
            )
            if number > 0:
                chosen.append((holding, number))
                count -= number
        if count <= 0:
            for holding, number in chosen:
                self._take(holding, number, "extent")
        return count <= 0
