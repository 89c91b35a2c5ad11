"""Blocks that come to lie elsewhere while sequences use them (design §4 rule 2).

    sealed    pool copies ─► record at the new place ─► leases told ─► each switches between two steps, acknowledges
    private   new place kept ─► its lease told ─► it copies, switches and acknowledges ─► record at the new place

The old place is free when every lease that was told has acknowledged or ended. A lease that does not in `DEADLINE_S` is
overdue: the shell takes it away. Only a lease that switches can say what its writer has written, so only it copies
private blocks; sealed bytes never change, so that the pool can copy them at once and give out the new place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from remora.namespaces.blocks import Block, BlockLedger
from remora.namespaces.commands import RelocateItem
from remora.namespaces.extents import Extent, GeometrySpace
from remora.namespaces.holds import Holds
from remora.namespaces.leases import Lease, LeaseBook
from remora.namespaces.sequences import RunningTable, Sequence
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import LeaseId

DEADLINE_S = 10.0


class Place(NamedTuple):
    """Where a block is used: a sequence's table, and the position in it."""

    sequence: Sequence
    position: int

    def holds(self, block: Block) -> bool:
        """Whether the block is still there."""
        blocks = self.sequence.blocks
        return self.position < len(blocks) and blocks[self.position] is block


class Relocation(msgspec.Struct, eq=False):
    """One block on the move. `extent` and `index` are its other place: the old one of a sealed block, the new one of a
    private block."""

    #: None: restored after the block had gone.
    block: Block | None
    extent: Extent
    index: int
    started_s: float
    #: Event that told each lease, until it acknowledges.
    waiting: dict[LeaseId, int]
    #: Of a private block: the one table it is in.
    place: Place | None = None


class Relocations:
    """All blocks of a pool that are on the move. Uses and changes the ledger, extents and leases."""

    def __init__(self, ledger: BlockLedger, leases: LeaseBook, running: RunningTable, holds: Holds) -> None:
        self._ledger = ledger
        self._leases = leases
        self._running = running
        self._holds = holds
        self.moves: list[Relocation] = []
        #: When blocks were last gathered for a request that lacked memory (namespaces/gathering.py).
        self.gathered_s = 0.0

    def places(self, blocks: set[Block]) -> dict[Block, list[Place]]:
        """Where those of the blocks are used that can be moved: by tables of leases that switch, and nothing else."""
        found: dict[Block, list[Place]] = {block: [] for block in blocks}
        stuck = {move.block for move in self.moves}
        stuck.update(blocks.intersection(self._holds.references()))
        for sequence in self._running.sequences.values():
            stuck.update(blocks.intersection(sequence.sources))
            switches = self._leases.leases[sequence.lease_id].attach.relocates
            for position, block in enumerate(sequence.blocks):
                if block in found:
                    found[block].append(Place(sequence, position))
                    if not switches:
                        stuck.add(block)
        return {
            block: places
            for block, places in found.items()
            if block not in stuck and (block.block_hash is not None or (block.refs == len(places) == 1))
        }

    def begin(self, moves: Iterable[tuple[Block, list[Place], Extent, int]], now_s: float) -> None:
        """Moves referenced blocks, each with the tables it is in, to places that were reserved; tells who uses them."""
        told: dict[LeaseId, list[RelocateItem]] = {}
        begun: list[Relocation] = []
        copies: dict[GeometrySpace, list[tuple[int, int]]] = {}
        for block, places, extent, index in moves:
            space, old = block.holding.space, block.index
            sealed = block.block_hash is not None
            move = Relocation(block, extent, index, now_s, {}, None if sealed else places[0])
            if sealed:
                copies.setdefault(space, []).append((old, index))
                self._switch(move, block)
            for place in places:
                move.waiting[place.sequence.lease_id] = 0
                told.setdefault(place.sequence.lease_id, []).append(_item(place, old, index, copy=not sealed))
            if move.waiting:
                begun.append(move)
            else:  # referenced as an ancestor only: no table names it
                space.unreserve(move.extent, move.index)
        for space, pairs in copies.items():
            self._ledger.copy(space, pairs)
        self._tell(told, begun)
        self.moves += begun

    def _tell(self, told: dict[LeaseId, list[RelocateItem]], moves: Iterable[Relocation]) -> None:
        events = {
            lease_id: self._leases.leases[lease_id].tell_relocate(tuple(items)) for lease_id, items in told.items()
        }
        for move in moves:
            move.waiting = {lease_id: events[lease_id] for lease_id in move.waiting}

    def _switch(self, move: Relocation, block: Block) -> None:
        """The block's record goes to the other place; the one it had is kept instead."""
        old_extent, old_index = block.extent, block.index
        block.holding.space.swap(block, move.extent, move.index)
        if block.refs:
            old_extent.num_referenced -= 1
            move.extent.num_referenced += 1
        self._ledger.renumber(block, old_index)
        move.extent, move.index = old_extent, old_index

    def acknowledge(self, lease: Lease, event_no: int, now_s: float) -> int:
        """The lease has switched all it was told up to this event. Returns how many places became free."""
        lease_id = lease.attach.lease_id
        lease.relocations = {number for number in lease.relocations if number > event_no}
        done = [move for move in self.moves if move.waiting.get(lease_id, event_no + 1) <= event_no]
        return self._settle(done, lease_id, now_s)

    def forget(self, lease_id: LeaseId, now_s: float) -> int:
        """The lease has ended and uses nothing any more."""
        return self._settle([move for move in self.moves if lease_id in move.waiting], lease_id, now_s)

    def _settle(self, moves: list[Relocation], lease_id: LeaseId, now_s: float) -> int:
        num_free = 0
        told: dict[LeaseId, list[RelocateItem]] = {}
        for move in moves:
            del move.waiting[lease_id]
            if move.place is not None:
                self._finish_private(move, told)
                move.started_s = now_s
            if not move.waiting:
                self.moves.remove(move)
                space = move.extent.space
                if space is None:
                    raise IntegrityError(f"the place {move.index} of a block on the move belongs to no geometry")
                space.unreserve(move.extent, move.index)
                num_free += 1
        self._tell(told, [move for move in moves if move.waiting and not all(move.waiting.values())])
        return num_free

    def _finish_private(self, move: Relocation, told: dict[LeaseId, list[RelocateItem]]) -> None:
        """Its lease has copied the block, unless the block left the table before. Whoever came to share it since it was
        sealed is to be told now."""
        place, block = move.place, move.block
        move.place = None
        if place is None or block is None or not place.holds(block):
            return
        old = block.index
        self._switch(move, block)
        for other in self._users(block):
            if other != place:
                move.waiting[other.sequence.lease_id] = 0
                told.setdefault(other.sequence.lease_id, []).append(_item(other, old, block.index, copy=False))

    def _users(self, block: Block) -> list[Place]:
        return [
            Place(sequence, position)
            for sequence in self._running.sequences.values()
            for position, other in enumerate(sequence.blocks)
            if other is block
        ]

    def overdue(self, now_s: float) -> set[LeaseId]:
        """Leases that were told too long ago."""
        return {lease_id for move in self.moves if move.started_s + DEADLINE_S <= now_s for lease_id in move.waiting}

    def num_settled(self, blocks: list[Block]) -> int:
        """How many of the first blocks stay where they are: one that was sealed on its move goes to its new place when
        its lease has copied it."""
        moving = {move.block for move in self.moves if move.place is not None}
        return next((count for count, block in enumerate(blocks) if block in moving), len(blocks))

    def num_moving(self, space: GeometrySpace) -> int:
        return sum(move.extent.space is space for move in self.moves)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a place is kept for no move, or a move waits for nobody or for a lease that is
        gone."""
        kept = {(move.extent.index, move.index) for move in self.moves}
        spaces = {move.extent.space for move in self.moves}
        found = {(e.index, index) for s in spaces if s is not None for e in s.extents.values() for index in e.moving}
        if kept != found or len(kept) != len(self.moves):
            raise IntegrityError("places are kept for blocks that are not on the move, or the reverse")
        for move in self.moves:
            if not move.waiting or not move.waiting.keys() <= self._leases.leases.keys():
                raise IntegrityError(f"a block on the move waits for leases that are gone: {move.waiting}")


def _item(place: Place, old: int, new: int, *, copy: bool) -> RelocateItem:
    return RelocateItem(
        sequence_id=place.sequence.admit.sequence_id, position=place.position, old_block=old, new_block=new, copy=copy
    )
