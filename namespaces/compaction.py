"""Compaction and trimming on demand: blocks of a geometry lie in as few extents as they fit in, and empty extents are
given up."""

from __future__ import annotations

from remora.namespaces.admission import Admission
from remora.namespaces.commands import Compact, Compacted, Refused, Trim, Trimmed
from remora.namespaces.gathering import gather
from remora.namespaces.pool_parts import PoolParts


class Compaction:
    """Uses and changes a pool's parts."""

    def __init__(self, parts: PoolParts, admission: Admission) -> None:
        self.parts = parts
        self.admission = admission

    def compact(self, command: Compact, now_s: float) -> Compacted | Refused:
        """One round for the geometries of a namespace: moves at most about so many blocks. To be said again until
        nothing moves and nothing is on the move."""
        parts = self.parts
        namespace = parts.book.namespaces.get(command.namespace_id)
        if namespace is None or command.max_blocks < 1:
            message = f"no namespace {command.namespace_id!r} in this pool, or max_blocks {command.max_blocks} below 1"
            return Refused(error="NotFound" if namespace is None else "InvalidRequest", message=message)
        own = parts.book.space_of(namespace)
        used = {own} if own is not None else set()
        spaces = sorted(used | {holding.space for holding in namespace.holdings.values()}, key=lambda each: each.order)
        num_moved = num_released = 0
        for space in spaces:
            if num_moved < command.max_blocks:
                num_moved += gather(parts, space, command.max_blocks - num_moved, now_s)
            num_released += parts.extents.release_empty(space)
        if num_released:
            self.admission.pump(now_s)
        return Compacted(
            num_moved_blocks=num_moved,
            num_moving_blocks=sum(parts.relocations.num_moving(space) for space in spaces),
            num_released_extents=num_released,
            num_extents=sum(len(space.extents) for space in spaces),
        )

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
