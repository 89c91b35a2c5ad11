"""The engine's side of the pool's protocol: what is asked, and what the answers mean for sequences.

Nothing here waits. Commands are answered in the order in which they were sent; events come at any time. An answer or an
event for a run that is over changes nothing: its Release was sent behind everything else, so what it grants is free
again, and one more Release makes sure.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, assert_never

from remora.cache_actors.port import EngineCommand, PoolPort
from remora.deployments.engine.base import EngineConfig
from remora.deployments.engine.sequence import Phase, Sequence
from remora.namespaces.commands import (
    Admit,
    Admitted,
    AnyAnswer,
    AnyEvent,
    Denied,
    Done,
    Extend,
    Extended,
    ExtendItem,
    Granted,
    OverQuota,
    Preempt,
    Publish,
    Published,
    Refused,
    Release,
    Released,
    Relocate,
    Relocated,
    Seal,
    Wait,
)
from remora.namespaces.edits import Removal
from remora.namespaces.sequence_commands import Edited, NoRoom, SequenceRemove, Settle, Settled
from remora.platform.base.errors import IntegrityError, StaleLease
from remora.platform.base.ids import BlockHash, LeaseId, SequenceId

_log = logging.getLogger(__name__)

#: The port stamps lease and call number.
_NO_LEASE = LeaseId("")


class PoolListener(Protocol):
    """What the engine does about answers."""

    def on_admitted(self, sequence: Sequence, admitted: Admitted) -> None: ...

    def on_parked(self, sequence: Sequence) -> None: ...

    def on_over_quota(self, sequence: Sequence, answer: OverQuota) -> None: ...

    def on_preempted(self, sequence: Sequence, reason: str) -> None: ...

    def on_edited(self, sequence: Sequence, edited: Edited) -> None:
        """Tokens were taken out of its table: the bytes must be moved, then the edit settled."""
        ...

    def on_edit_refused(self, sequence: Sequence, reason: str) -> None: ...

    def on_pool_fault(self, sequence: Sequence, refused: Refused) -> None:
        """The pool refused a command of this sequence as wrong; it cannot go on."""
        ...

    def on_published(self, hashes: Iterable[BlockHash]) -> None:
        """These blocks can be found by others now."""
        ...

    def on_lease_lost(self, reason: str) -> None: ...


class PoolLink:
    """Engine thread only."""

    def __init__(
        self,
        port: PoolPort,
        listener: PoolListener,
        config: EngineConfig,
        *,
        copy_block: Callable[[Sequence, int, int], None],
    ) -> None:
        """`copy_block(sequence, source, target)` copies a block that only the sequence writes, when it comes to lie
        elsewhere."""
        self._port = port
        self._listener = listener
        self._copy_block = copy_block
        self._config = config
        self._by_id: dict[SequenceId, Sequence] = {}
        # Sequence ids are never reused, not even by another engine of the pool.
        self._id_prefix = secrets.token_hex(6)
        self._run_numbers = itertools.count(1)
        self._seals: list[Seal] = []
        self._released: list[SequenceId] = []
        #: Steps under way write to the blocks of these runs: they are not given back before those are done.
        self.flying: Collection[SequenceId] = ()
        self._last_publish_s = -1e9
        #: Not done yet, in order.
        self._relocations: deque[Relocate] = deque()
        self.num_published_blocks = 0

    # ---- commands

    def admit(self, sequence: Sequence, deadline_s: float | None) -> None:
        """Asks for the sequence's blocks; starts a run."""
        sequence.sequence_id = SequenceId(f"{self._id_prefix}-{next(self._run_numbers)}")
        self._by_id[sequence.sequence_id] = sequence
        request = sequence.live.request
        self._port.send(
            Admit(
                lease_id=_NO_LEASE,
                sequence_id=sequence.sequence_id,
                namespace_id=sequence.namespace_id,
                hashes=tuple(sequence.extend_hashes(sequence.horizon // sequence.block_tokens)),
                num_tokens=sequence.horizon,
                num_blocks=sequence.num_wanted_blocks(self._config.num_reserve_blocks),
                max_blocks=sequence.max_blocks,
                session_id=request.session_id,
                # A standby must not end the attempt that it stands by.
                epoch=request.epoch if request.standby_of is None else request.standby_of,
                priority=request.priority,
                geometry_id=sequence.memory.geometry.geometry_id,
                kept=sequence.kept_chains(),
                deadline_s=deadline_s,
            )
        )

    def ask_for_blocks(self, running: Iterable[Sequence], now_s: float) -> None:
        """One Extend for all running sequences whose reserve is used up."""
        items = []
        for sequence in running:
            missing = sequence.num_wanted_blocks(self._config.num_reserve_blocks) - sequence.num_blocks
            if missing > 0 and not sequence.is_extend_pending and now_s >= sequence.extend_after_s:
                sequence.is_extend_pending = True
                assert sequence.sequence_id is not None
                items.append(ExtendItem(sequence_id=sequence.sequence_id, num_blocks=missing))
        if items:
            self._port.send(Extend(lease_id=_NO_LEASE, items=tuple(items)))

    def edit(self, sequence: Sequence, removal: Removal) -> None:
        """Asks for tokens to be taken out of a running sequence's blocks; what is full is published before."""
        assert sequence.sequence_id is not None
        self._seals.extend(sequence.take_seals())
        self._send_seals()
        sequence.is_edit_pending = True
        self._port.send(
            SequenceRemove(
                lease_id=_NO_LEASE,
                sequence_id=sequence.sequence_id,
                start=removal.start,
                end=removal.end,
                close_gap=True,
                num_tokens=removal.at,
            )
        )

    def settle(self, sequence: Sequence) -> None:
        """The bytes of an edit are moved."""
        assert sequence.sequence_id is not None
        self._port.send(Settle(lease_id=_NO_LEASE, sequence_ids=(sequence.sequence_id,)))

    def publish(self, running: Iterable[Sequence], now_s: float) -> None:
        """Publishes blocks that became full, at most once in `publish_interval_s`."""
        if now_s - self._last_publish_s < self._config.publish_interval_s:
            return
        for sequence in running:
            self._seals.extend(sequence.take_seals())
        if self._seals:
            self._last_publish_s = now_s
            self._send_seals()

    def release(self, sequence: Sequence) -> None:
        """Ends the run: seals what is full, forgets the blocks. Leaves with the next `flush`."""
        if sequence.sequence_id is None:
            return
        self._seals.extend(sequence.take_seals())
        self._released.append(sequence.sequence_id)
        del self._by_id[sequence.sequence_id]
        sequence.end_run()

    def flush(self) -> None:
        """Sends what `release` collected: seals first, so that they stay cached."""
        self._send_seals()
        if self._released:
            free = [name for name in self._released if name not in self.flying]
            self._released = [name for name in self._released if name in self.flying]
            if free:
                self._port.send(Release(lease_id=_NO_LEASE, sequence_ids=tuple(free)))

    def _send_seals(self) -> None:
        if self._seals:
            self._port.send(Publish(lease_id=_NO_LEASE, seals=tuple(self._seals)))
            self._seals.clear()

    # ---- answers

    def handle_answer(self, command: EngineCommand, answer: AnyAnswer, now_s: float) -> None:
        match answer:
            case Admitted():
                self._admitted(answer)
            case Wait(sequence_id=sequence_id):
                sequence = self._by_id.get(sequence_id)
                # The grant may have overtaken this answer.
                if sequence is not None and sequence.phase is Phase.ADMITTING:
                    self._listener.on_parked(sequence)
            case OverQuota():
                self._over_quota(answer)
            case Extended():
                self._extended(answer, now_s)
            case Published(num_sealed=num_sealed):
                self.num_published_blocks += num_sealed
                if isinstance(command, Publish):
                    self._listener.on_published(seal.block_hash for seal in command.seals)
            case Edited(sequence_id=sequence_id):
                if (sequence := self._by_id.get(sequence_id)) is not None:
                    self._listener.on_edited(sequence, answer)
            case NoRoom(sequence_id=sequence_id):
                if (sequence := self._by_id.get(sequence_id)) is not None:
                    self._listener.on_edit_refused(sequence, "there is no memory to move its tokens")
            case Released() | Settled():
                pass
            case Refused():
                self._refused(command, answer)
            case Done() if isinstance(command, Relocated):
                pass
            case _:
                raise IntegrityError(f"the pool answered {type(command).__name__} with {type(answer).__name__}")
        self._relocate()

    def handle_event(self, event: AnyEvent) -> None:
        match event:
            case Granted(admitted=admitted):
                self._admitted(admitted)
            case Denied(over_quota=over_quota):
                self._over_quota(over_quota)
            case Preempt(sequence_id=sequence_id, reason=reason):
                if (sequence := self._by_id.get(sequence_id)) is not None:
                    self._listener.on_preempted(sequence, reason)
            case Relocate():
                self._relocations.append(event)
            case _:
                assert_never(event)
        self._relocate()

    def _relocate(self) -> None:
        """Switches to new places of blocks, as soon as the tables they speak of are those that the pool has seen."""
        while self._relocations:
            event = self._relocations[0]
            known = [(item, self._by_id.get(item.sequence_id)) for item in event.items]
            if any(sequence is not None and not _has_answers(sequence, item.position) for item, sequence in known):
                return  # an answer is on its way that this event came after
            self._relocations.popleft()
            for item, sequence in known:
                if sequence is not None and sequence.names(item.position, item.old_block):
                    if item.copy:
                        self._copy_block(sequence, item.old_block, item.new_block)
                    sequence.switch_block(item.position, item.new_block)
            self._port.send(Relocated(lease_id=_NO_LEASE, event_no=event.event_no))

    def _admitted(self, admitted: Admitted) -> None:
        sequence = self._by_id.get(admitted.sequence_id)
        if sequence is None:
            _log.info("late admission of %s is given back", admitted.sequence_id)
            self._released.append(admitted.sequence_id)
        elif sequence.phase is not Phase.RUNNING:
            self._listener.on_admitted(sequence, admitted)

    def _over_quota(self, answer: OverQuota) -> None:
        sequence = self._by_id.get(answer.sequence_id)
        if sequence is not None and sequence.phase is not Phase.RUNNING:
            self._listener.on_over_quota(sequence, answer)

    def _extended(self, answer: Extended, now_s: float) -> None:
        for grant in answer.grants:
            if (sequence := self._by_id.get(grant.sequence_id)) is not None:
                sequence.is_extend_pending = False
                sequence.add_blocks(grant.blocks)
                sequence.spans.took(grant.taken)
        for sequence_id in answer.refused:
            if (sequence := self._by_id.get(sequence_id)) is not None:
                sequence.is_extend_pending = False
                sequence.extend_after_s = now_s + self._config.extend_retry_s
        for sequence_id in answer.preempted:
            if (sequence := self._by_id.get(sequence_id)) is not None:
                self._listener.on_preempted(sequence, "no memory to extend it")

    def _refused(self, command: EngineCommand, refused: Refused) -> None:
        if refused.error == StaleLease.__name__:
            self._listener.on_lease_lost(refused.message)
            return
        match command:
            case Admit(sequence_id=sequence_id):
                if (sequence := self._by_id.get(sequence_id)) is not None:
                    self._listener.on_pool_fault(sequence, refused)
            case Extend(items=items):
                asked = [self._by_id[item.sequence_id] for item in items if item.sequence_id in self._by_id]
                if len(items) == 1 and asked:
                    self._listener.on_pool_fault(asked[0], refused)
                    return
                # Nothing was changed, and one of them is to blame: each asks alone, once.
                for sequence in asked:
                    item = ExtendItem(
                        sequence_id=SequenceId(sequence.sequence_id or ""),
                        num_blocks=sequence.num_wanted_blocks(self._config.num_reserve_blocks) - sequence.num_blocks,
                    )
                    self._port.send(Extend(lease_id=_NO_LEASE, items=(item,)))
            case SequenceRemove(sequence_id=sequence_id):
                if (sequence := self._by_id.get(sequence_id)) is not None:
                    self._listener.on_edit_refused(sequence, refused.message)
            case _:
                # Blocks stay private, or are freed when the lease ends: no sequence is hurt.
                _log.error("the pool refused %s: %s: %s", type(command).__name__, refused.error, refused.message)

    # ---- integrity

    def check_integrity(self) -> None:
        """Raises IntegrityError unless exactly the sequences that the pool knows are in the table."""
        for sequence_id, sequence in self._by_id.items():
            if sequence.sequence_id != sequence_id:
                raise IntegrityError(f"{sequence_id} leads to a sequence that runs as {sequence.sequence_id}")

    @property
    def num_known(self) -> int:
        """Sequences that the pool knows or was asked for."""
        return len(self._by_id)


def _has_answers(sequence: Sequence, position: int) -> bool:
    """Whether the table is as the pool had it when it spoke of this position, or has changed since."""
    if sequence.phase is not Phase.RUNNING or sequence.is_edit_pending:
        return False
    return position < sequence.num_blocks or not sequence.is_extend_pending
