"""llama.cpp's memory operations on the sequences of a lease, as commands of a pool.

    SequenceCopy ─► Edited | NoRoom        SequenceKeep · Clear ─► Cleared
    SequenceRemove ─► Edited | NoRoom      SequencePositions    ─► Positions
    SequenceShift ─► Edited | NoRoom       Settle               ─► Settled

Ranges of positions are half-open; a negative start means the first position, a negative end means behind the last.
A command that cannot be done is answered `Refused` or `NoRoom` and changes nothing. `num_tokens` says how many tokens
the sequence's writer has computed so far; 0 means: as far as the pool knows.

The pool moves no bytes: `Edited.moves` says what the lease copies (and rotates) before it uses the new table. Moves
never write where they read, so they may be repeated. What they read stays until `Settle`.

Where this differs from llama.cpp, on purpose: a copy needs a target id that was never used (no union with what the
target held); positions belong to a sequence, so moving one sequence moves no other; positions of a sequence stay in
order, and a shift that would break that is refused; `SequenceKeep` and `Clear` end sequences of the own lease only.
"""

from __future__ import annotations

import msgspec

from remora.namespaces.command_base import Answer, Command
from remora.platform.base.ids import NamespaceId, SequenceId


class SequenceCopy(Command, frozen=True, kw_only=True, tag=True):
    """seq_cp: a new sequence with the positions [start, end) of another. Sealed blocks at the beginning are shared, the
    rest is copied. It belongs to no session."""

    source_id: SequenceId
    target_id: SequenceId
    start: int = -1
    end: int = -1
    num_tokens: int = 0


class SequenceRemove(Command, frozen=True, kw_only=True, tag=True):
    """seq_rm: the positions [start, end) leave the sequence. With `close_gap` those behind them move down by the length
    of the range (seq_add), else they keep their positions."""

    sequence_id: SequenceId
    start: int = -1
    end: int = -1
    close_gap: bool = False
    num_tokens: int = 0


class SequenceShift(Command, frozen=True, kw_only=True, tag=True):
    """seq_add: the positions [start, end) move by `delta`. What would get a negative position leaves the sequence."""

    sequence_id: SequenceId
    start: int = -1
    end: int = -1
    delta: int
    num_tokens: int = 0


class SequenceKeep(Command, frozen=True, kw_only=True, tag=True):
    """seq_keep: every other sequence of the lease in the same namespace ends."""

    sequence_id: SequenceId


class Clear(Command, frozen=True, kw_only=True, tag=True):
    """Ends all sequences of the lease, or those in one namespace. With `data` the namespace's cached blocks of this
    model are forgotten too, and everything that becomes free is overwritten with zeros."""

    namespace_id: NamespaceId | None = None
    data: bool = False


class SequencePositions(Command, frozen=True, kw_only=True, tag=True):
    """seq_pos_min and seq_pos_max."""

    sequence_id: SequenceId
    num_tokens: int = 0


class Settle(Command, frozen=True, kw_only=True, tag=True):
    """The moves of these sequences are done: what they read is needed no more. Until then they take no other edit."""

    sequence_ids: tuple[SequenceId, ...]


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Copy K and V of `num_tokens` slots from one block into another; K is rotated by `delta` positions."""

    source_block: int
    source_slot: int
    target_block: int
    target_slot: int
    num_tokens: int
    delta: int


class Edited(Answer, frozen=True, kw_only=True, tag=True):
    """The table of the sequence is now the first `num_kept_blocks` blocks of the table it had (SequenceCopy: of the
    source's) and then `blocks`."""

    sequence_id: SequenceId
    num_kept_blocks: int
    blocks: tuple[int, ...]
    num_tokens: int
    moves: tuple[Move, ...] = ()
    #: Tokens from here on depend on tokens or positions that are gone: their blocks are hashed behind an edit record
    #: (namespaces/edits.py). None: what is there is what a plain run computes.
    first_edited_token: int | None = None


class NoRoom(Answer, frozen=True, kw_only=True, tag=True):
    """Nothing was changed: there is no memory for the blocks that must be copied. Others are not preempted for it."""

    sequence_id: SequenceId
    num_missing_blocks: int


class Positions(Answer, frozen=True, kw_only=True, tag=True):
    """First and last position of a sequence; both -1 if it is empty."""

    pos_min: int
    pos_max: int


class Cleared(Answer, frozen=True, kw_only=True, tag=True):
    num_sequences: int
    #: Cached blocks that were forgotten.
    num_blocks: int = 0


class Settled(Answer, frozen=True, kw_only=True, tag=True):
    pass


SequenceCommand = SequenceCopy | SequenceRemove | SequenceShift | SequenceKeep | Clear | SequencePositions | Settle
SequenceAnswer = Edited | NoRoom | Positions | Cleared | Settled
