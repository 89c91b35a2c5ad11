"""Which running sequences have to go when cached memory is not enough.

Candidates are the sequences of borrowers and those of the asker's own namespace: a sequence of a namespace within its
guarantee never goes for somebody else. Lowest priority first, then borrowers before the guaranteed, then the asker's
geometry (whose blocks help at once), then the most recently admitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from remora.namespaces.blocks import Block
from remora.namespaces.extents import Extent, GeometrySpace
from remora.namespaces.placement import Shortage
from remora.namespaces.quotas import Namespace
from remora.namespaces.sequences import Sequence


def choose_victims(
    running: Iterable[Sequence],
    namespace: Namespace,
    space: GeometrySpace,
    shortage: Shortage,
    *,
    asker: Sequence | None,
    entitled: bool,
) -> list[Sequence]:
    """Sequences to preempt now so that `namespace` gets what it lacks; those told before count first.

    `entitled`: the namespace stays within its guarantee with what it asks for. With an asker the answer may be the
    asker alone: nobody of lower rank would help. Without one (a parked admission within its guarantee) only borrowers
    are candidates, and the answer is empty if they would not help either.
    """
    if asker is not None and asker.preempted:
        return [asker]
    estimate = _Estimate(namespace, space, limit_only=shortage.kind == "limit")
    candidates: list[Sequence] = []
    for sequence in running:
        if sequence.preempted:
            estimate.add(sequence)
        elif sequence.namespace is namespace:
            if asker is not None:
                candidates.append(sequence)
        elif sequence.namespace.is_borrower and shortage.kind == "memory":
            candidates.append(sequence)
    needed = shortage.num_missing
    if estimate.num_freed >= needed:
        return []

    def rank(sequence: Sequence) -> tuple[int, bool, bool, int]:
        owner = sequence.namespace
        borrows = not entitled if owner is namespace else owner.is_borrower
        return (sequence.admit.priority, not borrows, sequence.space is not space, -sequence.admitted_no)

    chosen: list[Sequence] = []
    for sequence in sorted(candidates, key=rank):
        if sequence is asker:
            return [asker]
        estimate.add(sequence)
        chosen.append(sequence)
        if estimate.num_freed >= needed:
            return chosen
    return []


class _Estimate:
    """Blocks of the asker's geometry that become available when sequences go."""

    def __init__(self, namespace: Namespace, space: GeometrySpace, *, limit_only: bool) -> None:
        self.namespace = namespace
        self.space = space
        self.limit_only = limit_only
        self.num_freed = 0
        self._dropped: dict[Block, int] = {}
        self._left_in_extent: dict[Extent, int] = {}
        #: Bytes that each borrower can still lose before it is down to its guarantee.
        self._excess: dict[int, int] = {}

    def add(self, sequence: Sequence) -> None:
        for block in sequence.references():
            dropped = self._dropped[block] = self._dropped.get(block, 0) + 1
            if dropped == block.refs:
                self._count(block)

    def _count(self, block: Block) -> None:
        owner = block.holding.namespace
        if self.limit_only:
            self.num_freed += owner is self.namespace
        elif block.holding.space is self.space:
            left = self._excess.get(owner.order, owner.held_bytes - owner.guaranteed_bytes)
            self._excess[owner.order] = left - self.space.block_bytes
            if owner is self.namespace or block.block_hash is None or left > 0:
                self.num_freed += 1
        else:
            left = self._left_in_extent.get(block.extent, block.extent.num_referenced) - 1
            self._left_in_extent[block.extent] = left
            if not left:
                self.num_freed += self.space.blocks_in(block.extent)
