"""Gathering: a geometry's blocks come to lie in as few extents as they fit in.

    extents   | a b . . | c . . . | d e f . |      the fullest ones that hold all blocks stay; the others' blocks go
              | a b c . |         | d e f . |      into their gaps, and the emptied extents to whoever needs them

Unreferenced blocks move at once. For blocks that sequences use see namespaces/relocation.py.
"""

from __future__ import annotations

from remora.namespaces.blocks import Block
from remora.namespaces.extents import Extent, GeometrySpace
from remora.namespaces.pool_parts import PoolParts
from remora.namespaces.quotas import Namespace
from remora.namespaces.relocation import Place
from remora.platform.base.errors import IntegrityError

#: Least time between two rounds for requests that lack memory.
_PAUSE_S = 0.02


def make_room(parts: PoolParts, namespace: Namespace, space: GeometrySpace, num_missing: int) -> None:
    """A request lacks memory in this geometry. The others gather what has to stay in fewer extents, and give up the
    cache in them that the namespace can claim; the extents are free as soon as those who use blocks there switched."""
    relocations = parts.relocations
    if len(parts.extents.spaces) < 2 or parts.now_s < relocations.gathered_s + _PAUSE_S:
        return
    relocations.gathered_s = parts.now_s
    wanted = -(-num_missing // space.min_extent_blocks)
    for other in parts.extents.spaces.values():
        if other is not space and wanted > 0:
            wanted -= _clear(parts, namespace, space, other, wanted)


def _clear(parts: PoolParts, namespace: Namespace, space: GeometrySpace, other: GeometrySpace, wanted: int) -> int:
    """Has up to so many extents of another geometry cleared; returns how many."""
    candidates = sorted(
        (extent for extent in other.extents.values() if not extent.moving and not extent.is_empty),
        key=lambda extent: (extent.num_referenced, len(extent.blocks), extent.index),
    )
    for count in range(min(wanted, len(candidates)), 0, -1):
        donors = candidates[:count]
        room = other.num_free_outside({extent.index for extent in donors})
        excess = sum(len(extent.blocks) for extent in donors) - room
        if sum(extent.num_referenced for extent in donors) > room + max(0, excess):
            continue
        if not _are_movable(parts, donors):
            continue
        if excess <= 0 or parts.placement.give_up(namespace, space, other, excess):
            _move(parts, other, donors, parts.now_s)
            return count
    return 0


def _are_movable(parts: PoolParts, donors: list[Extent]) -> bool:
    in_use = {block for extent in donors for block in extent.blocks.values() if block.refs}
    return not in_use or len(parts.relocations.places(in_use)) == len(in_use)


def gather(parts: PoolParts, space: GeometrySpace, max_blocks: int, now_s: float) -> int:
    """Moves about so many blocks of the geometry out of its emptiest extents; returns how many. An extent of which
    something has to stay is left alone."""
    donors = []
    num_blocks = 0
    for extent in donor_extents(space):
        if num_blocks < max_blocks and not extent.moving and _are_movable(parts, [extent]):
            donors.append(extent)
            num_blocks += len(extent.blocks)
    while donors and num_blocks > space.num_free_outside({extent.index for extent in donors}):
        num_blocks -= len(donors.pop().blocks)
    if donors:
        _move(parts, space, donors, now_s)
    return num_blocks


def _move(parts: PoolParts, space: GeometrySpace, donors: list[Extent], now_s: float) -> None:
    """Moves everything out of these extents; the caller has made sure that it can be moved and that there is room."""
    kept = {extent.index for extent in donors}
    in_use = {block for extent in donors for block in extent.blocks.values() if block.refs}
    places = parts.relocations.places(in_use) if in_use else {}
    moves: list[tuple[Block, list[Place], Extent, int]] = []
    for extent in donors:
        parts.placement.vacate(extent, kept)
        for block in sorted(in_use.intersection(extent.blocks.values()), key=lambda each: each.index):
            place = space.take_outside(kept)
            if place is None:
                raise IntegrityError(f"no room for the blocks of extent {extent.index}")
            place[0].claim(place[1], block.holding.namespace.domain)
            space.reserve(*place)
            moves.append((block, places[block], *place))
    if moves:
        parts.relocations.begin(moves, now_s)


def donor_extents(space: GeometrySpace) -> list[Extent]:
    """Extents whose blocks fit into the gaps of the others, emptiest first; as many as there are."""
    fullest = sorted(space.extents.values(), key=lambda extent: (-extent.num_taken, extent.index))
    room = space.num_used
    num_kept = 0
    for extent in fullest:
        if room <= 0:
            break
        room -= extent.num_blocks
        num_kept += 1
    return [extent for extent in reversed(fullest[num_kept:]) if not extent.is_empty]
