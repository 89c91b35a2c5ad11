"""llama.cpp's memory operations on a pool: copy, remove, shift, keep, clear (namespaces/sequence_commands.py).

What an operation leaves untouched at the beginning of a table is shared or kept; everything behind it goes to new
private blocks, so that sealed bytes never change and no other sequence moves. Each is decided first and then done
whole.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from remora.namespaces.admission import Admission
from remora.namespaces.blocks import Block
from remora.namespaces.commands import Refused
from remora.namespaces.effects import ZeroBlocks
from remora.namespaces.leases import Lease
from remora.namespaces.placement import Plan, Shortage
from remora.namespaces.pool_parts import PoolParts
from remora.namespaces.positions import (
    Piece,
    are_in_order,
    grown,
    in_range,
    num_tokens_of,
    num_untouched,
    pos_max,
    pos_min,
    removed,
    runs_of,
    shifted,
    taken,
)
from remora.namespaces.sequence_commands import (
    Clear,
    Cleared,
    Edited,
    Move,
    NoRoom,
    Positions,
    SequenceAnswer,
    SequenceCommand,
    SequenceCopy,
    SequenceKeep,
    SequencePositions,
    SequenceRemove,
    SequenceShift,
    Settle,
    Settled,
)
from remora.namespaces.sequences import Sequence
from remora.platform.base.ids import Epoch, SequenceId


class _Cut(NamedTuple):
    """Consecutive slots of one block of a table that go to one block of another; source and target count the blocks."""

    source: int
    source_slot: int
    target: int
    target_slot: int
    num_tokens: int
    delta: int


class SequenceEdits:
    """Uses and changes a pool's parts."""

    def __init__(self, parts: PoolParts, admission: Admission) -> None:
        self.parts = parts
        self.admission = admission

    def apply(self, lease: Lease, command: SequenceCommand, now_s: float) -> SequenceAnswer | Refused:
        """Answers one command of the lease; a refusal changes nothing."""
        match command:
            case SequenceCopy():
                return self._copy(lease, command)
            case SequencePositions():
                return self._positions(lease, command)
        answer = self._free(lease, command)
        self.admission.pump(now_s)
        return answer

    def _free(
        self, lease: Lease, command: SequenceRemove | SequenceShift | SequenceKeep | Clear | Settle
    ) -> SequenceAnswer | Refused:
        """Commands after which there may be more memory."""
        match command:
            case SequenceRemove() | SequenceShift():
                return self._edit(lease, command)
            case SequenceKeep(sequence_id=sequence_id):
                kept = lease.sequences.get(sequence_id)
                if kept is None:
                    return _unknown(sequence_id)
                others = [each for each in lease.sequences.values() if each.namespace is kept.namespace]
                others.remove(kept)
                for sequence in others:
                    self.parts.finish(lease, sequence)
                return Cleared(num_sequences=len(others))
            case Clear():
                return self._clear(lease, command)
            case Settle(sequence_ids=sequence_ids):
                for sequence_id in sequence_ids:
                    if sequence_id not in lease.sequences and sequence_id not in lease.finished:
                        return _unknown(sequence_id)
                for sequence_id in sequence_ids:
                    if (settled := lease.sequences.get(sequence_id)) is not None:
                        settled.settle(self.parts.ledger)
                return Settled()

    # ---- copy --------------------------------------------------------------------------------------------------------

    def _copy(self, lease: Lease, command: SequenceCopy) -> Edited | NoRoom | Refused:
        source = self._find(lease, command.source_id, command.num_tokens)
        if isinstance(source, Refused):
            return source
        if lease.knows(command.target_id):
            message = f"sequence id {command.target_id!r} was used before; ids are never reused"
            return Refused(error="Conflict", message=message)
        runs = grown(source.runs, source.num_tokens(command.num_tokens))
        pieces = taken(runs, *in_range(command.start, command.end))
        size = source.space.geometry.block_tokens
        num_shared = source.num_shareable(num_untouched(pieces) // size)
        num_tokens = num_tokens_of(runs_of(pieces))
        count = -(-num_tokens // size) - num_shared
        plan = self._plan(source, count)
        if isinstance(plan, Shortage):
            return NoRoom(sequence_id=command.target_id, num_missing_blocks=plan.num_missing)
        admit = msgspec.structs.replace(
            source.admit, sequence_id=command.target_id, hashes=(), session_id=None, epoch=Epoch(0)
        )
        ledger = self.parts.ledger
        target = Sequence(admit, self.parts.running.next_no, source.namespace, source.space, source.realm)
        target.blocks, num_same = source.share(ledger, num_shared)
        # What is copied stays until the lease has copied it, whatever becomes of the source.
        cuts = _cut(pieces, num_shared * size, size)
        end = max((cut.source for cut in cuts), default=num_shared - 1) + 1
        for position in range(num_shared, end):
            anchor = source.anchors.get(position)
            for block in (source.blocks[position],) if anchor is None else (anchor, source.blocks[position]):
                ledger.acquire(block)
                target.sources.append(block)
        fresh = self._grant(target, plan, count)
        target.hashes = source.hashes[:num_shared]
        target.num_cached = num_shared
        target.runs = runs_of(pieces)
        lease.sequences[command.target_id] = target
        self.parts.running.add(target)
        is_plain = num_untouched(pieces) == num_tokens
        return Edited(
            sequence_id=command.target_id,
            num_kept_blocks=num_same,
            blocks=tuple([block.index for block in target.blocks[num_same:]]),
            num_tokens=num_tokens,
            moves=_moves(cuts, source.blocks, fresh),
            first_edited_token=None if is_plain else num_untouched(pieces),
        )

    # ---- edits in place ----------------------------------------------------------------------------------------------

    def _edit(self, lease: Lease, command: SequenceRemove | SequenceShift) -> Edited | NoRoom | Refused:
        sequence = self._find(lease, command.sequence_id, command.num_tokens)
        if isinstance(sequence, Refused):
            return sequence
        runs = grown(sequence.runs, sequence.num_tokens(command.num_tokens))
        start, end = in_range(command.start, command.end)
        if isinstance(command, SequenceRemove):
            pieces = removed(runs, start, end, close_gap=command.close_gap)
        else:
            pieces = shifted(runs, start, end, command.delta)
            if not are_in_order(pieces):
                message = f"{command.sequence_id}: a shift by {command.delta} would put tokens on or behind each other"
                return Refused(error="InvalidRequest", message=message)
        size = sequence.space.geometry.block_tokens
        untouched, num_tokens = num_untouched(pieces), num_tokens_of(runs_of(pieces))
        num_kept = untouched // size
        if untouched == num_tokens and untouched % size and sequence.owns(num_kept):
            num_kept += 1  # its slots behind the end are written anew
        count = -(-num_tokens // size) - num_kept
        plan = self._plan(sequence, count)
        if isinstance(plan, Shortage):
            return NoRoom(sequence_id=command.sequence_id, num_missing_blocks=plan.num_missing)
        cuts = _cut(pieces, num_kept * size, size)
        old = sequence.blocks
        sequence.cut(
            self.parts.ledger,
            num_kept,
            num_hashes=untouched // size,
            num_sources=max((cut.source for cut in cuts), default=num_kept - 1) + 1,
        )
        fresh = self._grant(sequence, plan, count)
        sequence.runs = runs_of(pieces)
        return Edited(
            sequence_id=command.sequence_id,
            num_kept_blocks=num_kept,
            blocks=tuple([block.index for block in fresh]),
            num_tokens=num_tokens,
            moves=_moves(cuts, old, fresh),
            first_edited_token=None if untouched == num_tokens else untouched,
        )

    def _plan(self, sequence: Sequence, count: int) -> Plan | Shortage:
        return self.parts.placement.plan(sequence.namespace, sequence.space, count)

    def _grant(self, sequence: Sequence, plan: Plan, count: int) -> list[Block]:
        namespace, space = sequence.namespace, sequence.space
        self.parts.placement.apply(plan, space)
        fresh = self.parts.ledger.grant(namespace, space, count)
        sequence.blocks.extend(fresh)
        return fresh

    def _find(self, lease: Lease, sequence_id: SequenceId, num_tokens: int) -> Sequence | Refused:
        """The running sequence, if an operation on it can begin."""
        sequence = lease.sequences.get(sequence_id)
        if sequence is None:
            return _unknown(sequence_id)
        if sequence.sources:
            message = f"the moves of the last operation on {sequence_id!r} are not settled"
            return Refused(error="Conflict", message=message)
        if sequence.preempted:
            return Refused(error="Conflict", message=f"{sequence_id!r} was told to go")
        least, most = sequence.num_tokens(), len(sequence.blocks) * sequence.space.geometry.block_tokens
        if num_tokens and not least <= num_tokens <= most:
            message = f"{sequence_id!r} has from {least} to {most} tokens, not {num_tokens}"
            return Refused(error="InvalidRequest", message=message)
        return sequence

    def _positions(self, lease: Lease, command: SequencePositions) -> Positions | Refused:
        sequence = self._find(lease, command.sequence_id, command.num_tokens)
        if isinstance(sequence, Refused):
            return sequence
        runs = grown(sequence.runs, sequence.num_tokens(command.num_tokens))
        return Positions(pos_min=pos_min(runs), pos_max=pos_max(runs))

    def _clear(self, lease: Lease, command: Clear) -> Cleared:
        parts = self.parts
        chosen = [
            namespace
            for namespace in parts.book.namespaces.values()
            if namespace.model_id == lease.attach.model_id and command.namespace_id in (None, namespace.namespace_id)
        ]
        sequences = [each for each in lease.sequences.values() if each.namespace in chosen]
        seen: dict[Block, None] = {}
        for sequence in sequences:
            seen.update(dict.fromkeys(sequence.references()))
        for namespace in chosen if command.data else ():
            for space, _ in lease.formats.values():
                seen.update(dict.fromkeys(parts.realm(lease, space, namespace).blocks.values()))
        for sequence in sequences:
            parts.finish(lease, sequence)
        num_blocks = 0
        for space, _ in lease.formats.values() if command.data else ():
            for namespace in chosen:
                holding = namespace.holdings.get(space.geometry_id)
                while holding is not None and len(holding.policy):
                    parts.ledger.evict_first(holding, "cleared")
                    num_blocks += 1
            gone = (b for b in seen if b.holding.space is space and b.extent.blocks.get(b.index) is not b)
            free = tuple(sorted(block.index for block in gone))
            if free:
                zero = ZeroBlocks(geometry_id=space.geometry_id, block_bytes=space.block_bytes, blocks=free)
                parts.ledger.effects.append(zero)
        return Cleared(num_sequences=len(sequences), num_blocks=num_blocks)


def _cut(pieces: list[Piece], first_target_slot: int, block_tokens: int) -> list[_Cut]:
    """What must be moved: the pieces behind `first_target_slot`, cut at the borders of blocks."""
    cuts: list[_Cut] = []
    target = 0
    for piece in pieces:
        skipped = min(max(0, first_target_slot - target), piece.num_tokens)
        source, left = piece.slot + skipped, piece.num_tokens - skipped
        target += skipped
        while left > 0:
            count = min(left, block_tokens - source % block_tokens, block_tokens - target % block_tokens)
            cuts.append(_Cut(*divmod(source, block_tokens), *divmod(target, block_tokens), count, piece.delta))
            source, target, left = source + count, target + count, left - count
    return cuts


def _moves(cuts: list[_Cut], old: list[Block], fresh: list[Block]) -> tuple[Move, ...]:
    first = cuts[0].target if cuts else 0
    return tuple(
        [
            Move(old[cut.source].index, cut.source_slot, fresh[cut.target - first].index, cut.target_slot, *cut[4:])
            for cut in cuts
        ]
    )


def _unknown(sequence_id: SequenceId) -> Refused:
    return Refused(error="UnknownSequence", message=f"{sequence_id!r} is not a running sequence of this lease")
