"""Which running sequences have to go when cached memory is not enough.

Candidates are the sequences of those who use more than they are guaranteed, and those of the asker's own namespace: a
sequence of a namespace within its guarantee never goes for somebody else, whatever its namespace has cached. Lowest
priority first, then borrowers before the guaranteed, then the asker's geometry (whose blocks help at once), then those
of the namespace that would still use most above its guarantee, for its weight; inside a namespace the most recently
admitted. So running sequences converge to the same shares as admissions (namespaces/waiting.py), and who uses more than
its share with a single large sequence is not sent away again and again for those who have many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from remora.namespaces.blocks import Block
from remora.namespaces.extents import GeometrySpace
from remora.namespaces.placement import Shortage
from remora.namespaces.quotas import Namespace
from remora.namespaces.sequences import Sequence

#: Priority, whether it is within a guarantee, whether it is of another geometry; least first.
Rank = tuple[int, bool, bool]


def choose_victims(
    running: Iterable[Sequence],
    namespace: Namespace,
    space: GeometrySpace,
    shortage: Shortage,
    *,
    asker: Sequence | None,
    entitled: Namespace | None,
) -> list[Sequence]:
    """Sequences to preempt now so that `namespace` gets what it lacks; those told before count first.

    `entitled`: the one of its lineage whose guarantee covers what it asks for; nobody of that tree has to go for it.
    With an asker the answer may be the asker alone: nobody of lower rank would help. Without one (a parked admission
    within a guarantee) only borrowers are candidates, and the answer is empty if they would not help either.
    """
    if asker is not None and asker.preempted:
        return [asker]
    leaving = _Leaving()
    estimate = _Estimate(namespace, space, shortage.account)
    turns = _Turns(leaving)

    def leave(sequence: Sequence) -> None:
        for block in leaving.add(sequence):
            estimate.count(block)
            turns.count(block)

    candidates: list[Sequence] = []
    for sequence in running:
        if sequence.preempted:
            leave(sequence)
        elif sequence.namespace is namespace:
            if asker is not None:
                candidates.append(sequence)
        elif _may_go(sequence.namespace, namespace, shortage, entitled):
            candidates.append(sequence)
    needed = shortage.num_missing
    if estimate.num_freed >= needed:
        return []

    def rank(sequence: Sequence) -> Rank:
        borrows = sequence.namespace is not namespace or entitled is None
        return (sequence.admit.priority, not borrows, sequence.space is not space)

    chosen: list[Sequence] = []
    for sequence in turns.order(candidates, rank):
        if sequence is asker:
            return [asker]
        leave(sequence)
        chosen.append(sequence)
        if estimate.num_freed >= needed:
            return chosen
    return []


def choose_surplus(running: Iterable[Sequence], account: Namespace) -> list[Sequence]:
    """Sequences that have to go because a limit was lowered below what the namespace and those below it use; lowest
    priority first, then the most recently admitted. Nobody below it falls under its own guarantee if others can go."""
    surplus = account.tree_used_bytes - account.quota.limit_bytes
    left = {a: a.tree_used_bytes - a.guaranteed_bytes for s in running for a in s.namespace.accounts_against(account)}
    leaving = _Leaving()
    chosen: list[Sequence] = []

    def drop(sequence: Sequence) -> int:
        freed = 0
        for block in leaving.add(sequence):
            owner = block.holding.namespace
            if account.contains(owner):
                freed += block.holding.space.block_bytes
                for each in owner.lineage():
                    left[each] = left.get(each, 0) - block.holding.space.block_bytes
        return freed

    below = [sequence for sequence in running if account.contains(sequence.namespace)]
    for sequence in below:
        if sequence.preempted:
            surplus -= drop(sequence)
    for sequence in sorted(below, key=lambda each: (each.admit.priority, -each.admitted_no)):
        if surplus <= 0:
            break
        within = any(
            left[each] <= 0 for each in sequence.namespace.lineage() if each is not account and account.contains(each)
        )
        if not sequence.preempted and not within:
            chosen.append(sequence)
            surplus -= drop(sequence)
    return chosen


def _may_go(owner: Namespace, namespace: Namespace, shortage: Shortage, entitled: Namespace | None) -> bool:
    """Whether running sequences of another namespace may be preempted for this one."""
    if shortage.account is not None and not shortage.account.contains(owner):
        return False
    return owner.may_be_preempted_for(namespace) and (entitled is None or not entitled.contains(owner))


class _Leaving:
    """References that are gone with the sequences that go."""

    def __init__(self) -> None:
        self._dropped: dict[Block, int] = {}

    def add(self, sequence: Sequence) -> list[Block]:
        """The sequence goes. Returns the blocks that nobody references any more."""
        freed: list[Block] = []
        for block in sequence.references():
            dropped = self._dropped[block] = self._dropped.get(block, 0) + 1
            if dropped == block.refs:
                freed.append(block)
        return freed

    def is_last(self, block: Block) -> bool:
        """Whether one reference is left."""
        return block.refs == self._dropped.get(block, 0) + 1


class _Turns:
    """Which namespace loses a sequence next, as one after the other goes."""

    def __init__(self, leaving: _Leaving) -> None:
        self._leaving = leaving
        #: Bytes that those who went used alone: of a namespace, and of it and all below it.
        self._gone: dict[Namespace, int] = {}
        self._gone_below: dict[Namespace, int] = {}
        #: Bytes that go with a candidate, as of when it became the next of its namespace.
        self._sizes: dict[Sequence, int] = {}

    def count(self, block: Block) -> None:
        """A block that nobody references any more."""
        owner, size = block.holding.namespace, block.holding.space.block_bytes
        self._gone[owner] = self._gone.get(owner, 0) + size
        for account in owner.lineage():
            self._gone_below[account] = self._gone_below.get(account, 0) + size

    def order(self, candidates: Iterable[Sequence], rank: Callable[[Sequence], Rank]) -> Iterator[Sequence]:
        """By rank; those of one rank by turns of their namespaces. Each is expected to leave before the next is asked
        for."""
        lines: dict[Namespace, list[Sequence]] = {}
        for sequence in sorted(candidates, key=lambda each: (rank(each), -each.admitted_no), reverse=True):
            lines.setdefault(sequence.namespace, []).append(sequence)
        while lines:
            owner = min(lines, key=lambda each: self._place(lines[each][-1], rank))
            sequence = lines[owner].pop()
            if not lines[owner]:
                del lines[owner]
            yield sequence

    def _place(self, sequence: Sequence, rank: Callable[[Sequence], Rank]) -> tuple[Rank, tuple[float, ...], int]:
        owner = sequence.namespace
        size = self._sizes.get(sequence)
        if size is None:
            own = (block for block in sequence.references() if block.holding.namespace is owner)
            num_blocks = sum(self._leaving.is_last(block) for block in own)
            size = self._sizes[sequence] = num_blocks * sequence.space.block_bytes
        left = [
            (size + self._gone_below.get(a, 0) + a.guaranteed_bytes - a.tree_used_bytes) / a.quota.weight
            for a in owner.path()
        ]
        if owner.children:  # as in Namespace.standing
            left.append(float(size + self._gone.get(owner, 0) - owner.used_bytes))
        return rank(sequence), tuple(left), -sequence.admitted_no


class _Estimate:
    """Blocks of the asker's geometry that become available when sequences go."""

    def __init__(self, namespace: Namespace, space: GeometrySpace, account: Namespace | None) -> None:
        """`account`: whose limit is short; None: memory is."""
        self.namespace = namespace
        self.space = space
        self.account = account
        self.num_freed = 0
        self._free_elsewhere: dict[GeometrySpace, int] = {}
        #: Bytes that each account can still lose before it is down to its guarantee. Its cache is gone by then.
        self._excess: dict[Namespace, int] = {}

    def count(self, block: Block) -> None:
        """A block that nobody references any more."""
        owner, space = block.holding.namespace, block.holding.space
        if self.account is not None:
            self.num_freed += self.account.contains(owner)
            return
        spare = True
        for account in owner.accounts_against(self.namespace):
            left = self._excess.get(account, account.tree_used_bytes - account.guaranteed_bytes)
            self._excess[account] = left - space.block_bytes
            spare = spare and left > 0
        if not spare and block.block_hash is not None:
            return
        if space is self.space:
            self.num_freed += 1
            return
        # What is free of another geometry is gathered, and helps in whole extents (namespaces/gathering.py).
        before = self._free_elsewhere.get(space, space.num_free)
        self._free_elsewhere[space] = before + 1
        per_extent = space.min_extent_blocks
        self.num_freed += ((before + 1) // per_extent - before // per_extent) * self.space.min_extent_blocks
