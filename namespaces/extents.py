"""The arena cut into extents, and the blocks each geometry may use in them.

    arena   |----- extent 0 -----|----- extent 1 -----|----- extent 2 -----|
    blocks  | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | ...      block i at byte i * block_bytes
                              ^ block 4 crosses a border: it belongs to no extent

An extent is leased to one geometry at a time; the geometry's blocks are those that lie wholly inside its extents.
Blocks are taken from the fullest extent first, so that the emptiest can be given back. An empty extent stays with its
geometry until another one needs it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import IntegrityError

if TYPE_CHECKING:
    from remora.namespaces.blocks import Block

#: Extents that `find_run` looks into before it settles for scattered blocks.
_MAX_RUN_PROBES = 8


def block_span(extent_index: int, extent_bytes: int, block_bytes: int) -> tuple[int, int]:
    """First block lying wholly inside the extent, and how many there are (may be 0)."""
    start = extent_index * extent_bytes
    first = -(-start // block_bytes)
    return first, max(0, (start + extent_bytes) // block_bytes - first)


def first_run(mask: int, length: int) -> int:
    """Lowest bit position at which `length` consecutive bits of `mask` are set; -1 if there is none."""
    run = 1
    while run < length and mask:
        shift = min(run, length - run)
        mask &= mask >> shift
        run += shift
    return (mask & -mask).bit_length() - 1


class Extent:
    """One slice of the arena; its owner is the ExtentMap."""

    __slots__ = ("blocks", "first_block", "free_mask", "index", "last_domains", "moving", "num_blocks",
                 "num_referenced", "residue", "space")  # fmt: skip

    def __init__(self, index: int) -> None:
        self.index = index
        self.space: GeometrySpace | None = None
        self.first_block = 0
        self.num_blocks = 0
        #: Bit j set: block first_block + j is free.
        self.free_mask = 0
        #: Records of the blocks that are not free, by block index.
        self.blocks: dict[int, Block] = {}
        self.num_referenced = 0
        #: Blocks without a record that are not free: the other place of a block that is on the move.
        self.moving: set[int] = set()
        #: Per block the sharing domain whose content it holds; 0: not granted since the extent came to its geometry.
        self.last_domains: list[int] = []
        #: Domains whose content may lie in bytes that the present geometry has not granted yet.
        self.residue: set[int] = set()

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_taken

    @property
    def num_taken(self) -> int:
        return len(self.blocks) + len(self.moving)

    @property
    def is_empty(self) -> bool:
        return not self.blocks and not self.moving

    @property
    def is_movable(self) -> bool:
        """Whether it holds blocks, and nobody who would have to be asked before they go elsewhere."""
        return bool(self.blocks) and not self.num_referenced and not self.moving

    def claim(self, block_index: int, domain: int) -> bool:
        """Marks a free block as granted to a domain; True if its bytes may hold another domain's content."""
        slot = block_index - self.first_block
        self.free_mask &= ~(1 << slot)
        last = self.last_domains[slot]
        self.last_domains[slot] = domain
        return last != domain if last else bool(self.residue - {domain})


class GeometrySpace:
    """The extents and blocks of one geometry."""

    def __init__(self, geometry: KVGeometry, order: int, extent_bytes: int, num_extents: int) -> None:
        self.geometry = geometry
        self.geometry_id = geometry.geometry_id
        self.block_bytes = geometry.block_bytes
        #: Place in the order of arrival; breaks ties the same way on every replay.
        self.order = order
        self.extent_bytes = extent_bytes
        spans = [block_span(index, extent_bytes, self.block_bytes)[1] for index in range(num_extents)]
        #: Blocks that every extent holds at least.
        self.min_extent_blocks = min(spans, default=0)
        self.max_arena_blocks = sum(spans)
        self.extents: dict[int, Extent] = {}
        self.num_free = 0
        self.num_used = 0
        #: (free blocks, extent index) of the extents with free blocks, fullest extent first.
        self._with_free: list[tuple[int, int]] = []

    def blocks_in(self, extent: Extent) -> int:
        """Blocks this geometry would have in an extent that it does not lease yet."""
        return block_span(extent.index, self.extent_bytes, self.block_bytes)[1]

    def empty_extents(self) -> list[Extent]:
        """Leased extents without a block in use, in order of index."""
        found = []
        for num_free, index in reversed(self._with_free):
            extent = self.extents[index]
            if extent.is_empty:
                found.append(extent)
            elif num_free < self.min_extent_blocks:
                break
        return sorted(found, key=lambda extent: extent.index)

    def emptiest_extents(self) -> Iterator[Extent]:
        """Extents that hold blocks, none of them referenced, emptiest first."""
        candidates = [extent for extent in self.extents.values() if extent.is_movable]
        return iter(sorted(candidates, key=lambda extent: (len(extent.blocks), extent.index)))

    def num_free_outside(self, kept: Container[int]) -> int:
        return sum(num_free for num_free, index in self._with_free if index not in kept)

    def take_outside(self, kept: Container[int]) -> tuple[Extent, int] | None:
        """One free block in the fullest extent that is none of those; None: there is none."""
        for _, index in self._with_free:
            if index not in kept:
                extent = self.extents[index]
                low = extent.free_mask & -extent.free_mask
                return extent, extent.first_block + low.bit_length() - 1
        return None

    def take(self, count: int) -> list[tuple[Extent, int]]:
        """Chooses `count` free blocks, which the caller claims at once: a contiguous run in the fullest extent that
        has one, else scattered blocks, fullest extent first. The caller has checked that so many are free."""
        run = self._find_run(count) if count > 1 else None
        if run is not None:
            return run
        chosen: list[tuple[Extent, int]] = []
        for _, index in self._with_free:
            extent = self.extents[index]
            mask = extent.free_mask
            while mask and len(chosen) < count:
                low = mask & -mask
                chosen.append((extent, extent.first_block + low.bit_length() - 1))
                mask ^= low
            if len(chosen) == count:
                return chosen
        raise IntegrityError(f"{count} free blocks were promised, {len(chosen)} exist")

    def _find_run(self, count: int) -> list[tuple[Extent, int]] | None:
        start = bisect_left(self._with_free, (count, -1))
        for _, index in self._with_free[start : start + _MAX_RUN_PROBES]:
            extent = self.extents[index]
            slot = first_run(extent.free_mask, count)
            if slot >= 0:
                first = extent.first_block + slot
                return [(extent, block) for block in range(first, first + count)]
        return None

    def put(self, extent: Extent, block: Block) -> None:
        """Records a claimed block."""
        num_free = extent.num_free
        extent.blocks[block.index] = block
        self._move(extent, num_free, num_free - 1)
        self.num_free -= 1
        self.num_used += 1

    def free(self, extent: Extent, block_index: int) -> None:
        """A block has no content that anybody needs any more."""
        num_free = extent.num_free
        del extent.blocks[block_index]
        self._freed(extent, block_index, num_free)

    def _freed(self, extent: Extent, block_index: int, num_free: int) -> None:
        extent.free_mask |= 1 << (block_index - extent.first_block)
        self._move(extent, num_free, num_free + 1)
        self.num_free += 1
        self.num_used -= 1

    def reserve(self, extent: Extent, block_index: int) -> None:
        """Keeps a claimed block as the other place of one that is on the move."""
        num_free = extent.num_free
        extent.moving.add(block_index)
        self._move(extent, num_free, num_free - 1)
        self.num_free -= 1
        self.num_used += 1

    def unreserve(self, extent: Extent, block_index: int) -> None:
        """Nobody reads or writes there any more."""
        num_free = extent.num_free
        extent.moving.remove(block_index)
        self._freed(extent, block_index, num_free)

    def swap(self, block: Block, extent: Extent, block_index: int) -> None:
        """A block's record goes to its reserved other place; the one it had is reserved instead."""
        del block.extent.blocks[block.index]
        block.extent.moving.add(block.index)
        extent.moving.remove(block_index)
        block.extent, block.index = extent, block_index
        extent.blocks[block_index] = block

    def _move(self, extent: Extent, old_free: int, new_free: int) -> None:
        entries = self._with_free
        if old_free:
            del entries[bisect_left(entries, (old_free, extent.index))]
        if new_free:
            insort(entries, (new_free, extent.index))

    def adopt(self, extent: Extent) -> None:
        """Leases an extent that belongs to no geometry."""
        if extent.space is not None:
            raise IntegrityError(f"extent {extent.index} is leased to {extent.space.geometry_id} already")
        extent.space = self
        extent.first_block, extent.num_blocks = block_span(extent.index, self.extent_bytes, self.block_bytes)
        extent.free_mask = (1 << extent.num_blocks) - 1
        extent.last_domains = [0] * extent.num_blocks
        self.extents[extent.index] = extent
        self.num_free += extent.num_blocks
        self._move(extent, 0, extent.num_blocks)

    def give_back(self, extent: Extent) -> None:
        """Ends the lease of an empty extent; what its bytes may hold stays on record."""
        if not extent.is_empty or extent.space is not self:
            raise IntegrityError(f"extent {extent.index} is not an empty extent of {self.geometry_id}")
        self._move(extent, extent.num_blocks, 0)
        self.num_free -= extent.num_blocks
        del self.extents[extent.index]
        extent.residue.update(domain for domain in extent.last_domains if domain)
        extent.space = None
        extent.first_block = extent.num_blocks = extent.free_mask = 0
        extent.last_domains = []

    def check_integrity(self) -> None:
        """Raises IntegrityError when counts, masks and records disagree."""
        free = used = 0
        for index, extent in self.extents.items():
            span = block_span(index, self.extent_bytes, self.block_bytes)
            mask = (1 << extent.num_blocks) - 1
            for block_index in (*extent.blocks, *extent.moving):
                mask &= ~(1 << (block_index - extent.first_block))
            referenced = sum(1 for block in extent.blocks.values() if block.refs)
            if (extent.first_block, extent.num_blocks) != span or extent.space is not self:
                raise IntegrityError(f"extent {index} does not hold the blocks of {self.geometry_id}")
            if mask != extent.free_mask or referenced != extent.num_referenced:
                raise IntegrityError(f"extent {index}: its free mask or reference count is not that of its blocks")
            free += extent.num_free
            used += len(extent.blocks) + len(extent.moving)
        listed = sorted((e.num_free, index) for index, e in self.extents.items() if e.num_free)
        if (free, used) != (self.num_free, self.num_used) or listed != self._with_free:
            raise IntegrityError(f"geometry {self.geometry_id}: free or used blocks are miscounted")


class ExtentMap:
    """All extents of an arena: leased to a geometry, or unleased."""

    def __init__(self, data_bytes: int, extent_bytes: int) -> None:
        self.extent_bytes = extent_bytes
        self.extents = [Extent(index) for index in range(data_bytes // extent_bytes)]
        self.spaces: dict[str, GeometrySpace] = {}
        #: Indices of the extents of no geometry, ascending.
        self._unleased = list(range(len(self.extents)))

    def space_of(self, geometry: KVGeometry) -> GeometrySpace:
        """The geometry's space, made on first use."""
        space = self.spaces.get(geometry.geometry_id)
        if space is None:
            space = self.spaces[geometry.geometry_id] = self.sketch_space(geometry)
        return space

    def sketch_space(self, geometry: KVGeometry) -> GeometrySpace:
        """What the geometry's space would be, without keeping it."""
        return GeometrySpace(geometry, len(self.spaces), self.extent_bytes, len(self.extents))

    def unleased(self) -> Iterator[Extent]:
        """Extents of no geometry, in order of index."""
        return (self.extents[index] for index in self._unleased)

    @property
    def num_unleased(self) -> int:
        return len(self._unleased)

    def lease(self, extent: Extent, space: GeometrySpace) -> None:
        """Gives an unleased or empty extent to a geometry."""
        if extent.space is not None:
            extent.space.give_back(extent)
        else:
            del self._unleased[bisect_left(self._unleased, extent.index)]
        space.adopt(extent)

    def release_empty(self, space: GeometrySpace) -> int:
        """Takes a geometry's empty extents back; returns how many."""
        empty = space.empty_extents()
        for extent in empty:
            space.give_back(extent)
            insort(self._unleased, extent.index)
        return len(empty)

    def check_integrity(self) -> None:
        """Raises IntegrityError when an extent has two owners or a space is inconsistent."""
        for extent in self.extents:
            owners = [space for space in self.spaces.values() if space.extents.get(extent.index) is extent]
            if owners != ([extent.space] if extent.space is not None else []):
                raise IntegrityError(f"extent {extent.index} is leased to {len(owners)} geometries")
        if self._unleased != [extent.index for extent in self.extents if extent.space is None]:
            raise IntegrityError("the list of unleased extents is wrong")
        for space in self.spaces.values():
            space.check_integrity()
