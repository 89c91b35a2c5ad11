"""llama.cpp's memory operations from Python: seq_cp, seq_rm, seq_keep, seq_add, clear, seq_pos_min, seq_pos_max.

For the sequences of one lease, whoever admitted them; the caller computes their tokens and keeps their block tables.
Ranges are half-open; -1 means from the beginning, to the end. What differs from llama.cpp is listed in
namespaces/sequence_commands.py. An operation that cannot be done raises and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from remora.kernels.mover import KVMover
from remora.namespaces.commands import AnyAnswer, Refused
from remora.namespaces.sequence_commands import (
    Clear,
    Cleared,
    Edited,
    NoRoom,
    Positions,
    SequenceCommand,
    SequenceCopy,
    SequenceKeep,
    SequencePositions,
    SequenceRemove,
    SequenceShift,
    Settle,
    Settled,
)
from remora.platform.base.errors import OverQuota, PoolError
from remora.platform.base.ids import LeaseId, NamespaceId, SequenceId

#: Sends a command of the lease and returns its answer: PoolClient.ask, LocalPool.ask.
Ask = Callable[[SequenceCommand], Awaitable[AnyAnswer]]
A = TypeVar("A")
_NO_LEASE = LeaseId("")


class KVSequences:
    """Asks the pool, moves the bytes, and tells the pool that it is done. One operation at a time."""

    def __init__(self, ask: Ask, mover: KVMover) -> None:
        self._ask = ask
        self._mover = mover

    async def seq_cp(
        self, source: SequenceId, target: SequenceId, p0: int = -1, p1: int = -1, *, num_tokens: int = 0
    ) -> Edited:
        """`target`, a new sequence, gets positions [p0, p1) of `source`; sealed blocks at the beginning are shared.

        `num_tokens`: how many tokens of the source are computed; 0: those of its published blocks. Raises OverQuota
        when there is no memory for what must be copied, Conflict for a used target id.
        """
        command = SequenceCopy(
            lease_id=_NO_LEASE, source_id=source, target_id=target, start=p0, end=p1, num_tokens=num_tokens
        )
        return await self._edit(command, target)

    async def seq_rm(
        self, sequence: SequenceId, p0: int = -1, p1: int = -1, *, close_gap: bool = False, num_tokens: int = 0
    ) -> Edited:
        """Positions [p0, p1) leave; with `close_gap` the rest moves down in the same step. Raises OverQuota."""
        command = SequenceRemove(
            lease_id=_NO_LEASE, sequence_id=sequence, start=p0, end=p1, close_gap=close_gap, num_tokens=num_tokens
        )
        return await self._edit(command, sequence)

    async def seq_add(
        self, sequence: SequenceId, p0: int = -1, p1: int = -1, *, delta: int, num_tokens: int = 0
    ) -> Edited:
        """Positions [p0, p1) move by `delta`: K is rotated. Raises InvalidRequest if two would meet; OverQuota."""
        command = SequenceShift(
            lease_id=_NO_LEASE, sequence_id=sequence, start=p0, end=p1, delta=delta, num_tokens=num_tokens
        )
        return await self._edit(command, sequence)

    async def seq_keep(self, sequence: SequenceId) -> int:
        """Ends every other sequence of the lease in the namespace; returns how many."""
        answer = await self._call(SequenceKeep(lease_id=_NO_LEASE, sequence_id=sequence), Cleared)
        return answer.num_sequences

    async def clear(self, data: bool = False, *, namespace_id: NamespaceId | None = None) -> Cleared:
        """Ends the lease's sequences; with `data` forgets and zeroes what the namespace has cached of the model."""
        return await self._call(Clear(lease_id=_NO_LEASE, namespace_id=namespace_id, data=data), Cleared)

    async def seq_pos_min(self, sequence: SequenceId, *, num_tokens: int = 0) -> int:
        """-1 for an empty sequence."""
        return (await self._positions(sequence, num_tokens)).pos_min

    async def seq_pos_max(self, sequence: SequenceId, *, num_tokens: int = 0) -> int:
        """-1 for an empty sequence."""
        return (await self._positions(sequence, num_tokens)).pos_max

    async def _positions(self, sequence: SequenceId, num_tokens: int) -> Positions:
        command = SequencePositions(lease_id=_NO_LEASE, sequence_id=sequence, num_tokens=num_tokens)
        return await self._call(command, Positions)

    async def _edit(self, command: SequenceCopy | SequenceRemove | SequenceShift, sequence: SequenceId) -> Edited:
        if not self._mover.can_move:
            raise PoolError("the KV of this model cannot be moved; compute the tokens again instead")
        edited = await self._call(command, Edited)
        self._mover.move(edited.moves)
        await self._call(Settle(lease_id=_NO_LEASE, sequence_ids=(sequence,)), Settled)
        return edited

    async def _call(self, command: SequenceCommand, kind: type[A]) -> A:
        answer = await self._ask(command)
        if isinstance(answer, NoRoom):
            message = f"{answer.sequence_id}: memory for {answer.num_missing_blocks} blocks is missing"
            raise OverQuota(message, retry_after_s=1.0)
        if isinstance(answer, Refused):
            raise answer.as_error()
        assert isinstance(answer, kind), f"{type(command).__name__} was answered by {type(answer).__name__}"
        return answer
