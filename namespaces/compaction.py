"""Compaction and trimming: a geometry's blocks lie in as few extents as they fit in, and empty extents are given up.

    extents   | a b . . | c . . . | d e f . |      the fullest ones that hold all blocks stay; the others' blocks go
              | a b c . |         | d e f . |      into their gaps, and the emptied extents to whoever needs them

Unreferenced blocks move at once. For blocks that sequences use see namespaces/relocation.py.
"""

from __future__ import annotations

from remora.namespaces.admission import Admission
from remora.namespaces.commands import Compact, Compacted, Refused, Trim, Trimmed
from remora.namespaces.extents import Extent, GeometrySpace
from remora.namespaces.pool_parts import PoolParts


class Compaction:
    """Uses and changes a pool's parts."""

    def __init__(self, parts: PoolParts, admission: Admission) -> None:
        self.parts = parts
        self.admission = admission

    def compact(self, command: Compact, now_s: float) -> Compacted | Refused:
        """One round for the geometry of a namespace's model: moves at most so many blocks. To be said again until
        nothing moves and nothing is on the move."""
        parts = self.parts
        namespace = parts.book.namespaces.get(command.namespace_id)
        if namespace is None or command.max_blocks < 1:
            message = f"no namespace {command.namespace_id!r} in this pool, or max_blocks {command.max_blocks} below 1"
            return Refused(error="NotFound" if namespace is None else "InvalidRequest", message=message)
        space = parts.book.model_spaces.get(namespace.model_id)
        if space is None:
            return Compacted()
        num_moved = 0
        donors = donor_extents(space)
        kept = {extent.index for extent in donors}
        for extent in donors:
            if num_moved >= command.max_blocks:
                break
            if extent.is_movable and len(extent.blocks) <= space.num_free_outside(kept):
                num_moved += parts.placement.vacate(extent, kept)
        num_released = parts.extents.release_empty(space)
        if num_released:
            self.admission.pump(now_s)
        return Compacted(num_moved_blocks=num_moved, num_released_extents=num_released, num_extents=len(space.extents))

    def trim(self, command: Trim, now_s: float) -> Trimmed | Refused:
        """Gives up a namespace's cache down to what it may keep, and empty extents."""
        parts = self.parts
        namespace = parts.book.namespaces.get(command.namespace_id)
        if namespace is None:
            return Refused(error="NotFound", message=f"no namespace {command.namespace_id!r} in this pool")
        if command.target_bytes < 0:
            return Refused(error="InvalidRequest", message=f"target_bytes {command.target_bytes} is negative")
        trimmed_bytes = parts.placement.trim(namespace, command.target_bytes)
        num_released = sum(parts.extents.release_empty(space) for space in parts.extents.spaces.values())
        self.admission.pump(now_s)
        return Trimmed(trimmed_bytes=trimmed_bytes, num_released_extents=num_released)


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
