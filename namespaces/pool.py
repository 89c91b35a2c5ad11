"""The state of one pool: `apply` is a function of the state, the command and the time.

    shell                                   PoolState
    journal (command, now_s)
    answer = apply(command, now_s)  ──────► one command, whole or not at all
    do take_effects()               ◄────── bytes to zero, generation words
    note effects done, answer

After a crash `restore(snapshot)` and the journalled commands behind it, applied in order, give the same state: leases,
running sequences, parked admissions, answers kept for replay and all. Leases outlive the pool's process; the shell
checks with `leases()` which of their processes live and says LeaseLost for the others.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from remora.namespaces.admission import Admission
from remora.namespaces.chains import Chain, Link, find_chain, find_link, find_tips
from remora.namespaces.commands import (
    AddFormat,
    Admit,
    AnyAnswer,
    AnyCommand,
    AnyEvent,
    Attach,
    Compact,
    Detach,
    Done,
    EndSession,
    Extend,
    LeaseLost,
    Publish,
    Release,
    Released,
    Relocated,
    SetQuota,
    Tick,
    Trim,
)
from remora.namespaces.compaction import Compaction
from remora.namespaces.effects import CopyBlocks, Effect, SetGeneration, ZeroBlocks
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.growth import Growth
from remora.namespaces.hold_commands import Held, Hold, Unheld, Unhold
from remora.namespaces.leases import Lease
from remora.namespaces.membership import Membership
from remora.namespaces.pool_parts import PoolParts, PoolStateConfig
from remora.namespaces.quantisation import Quantisation
from remora.namespaces.quantise_commands import Quantise
from remora.namespaces.report import LeaseReport, PoolReport, count_blocks, describe_leases, describe_pool
from remora.namespaces.sequence_commands import SequenceCommand
from remora.namespaces.sequence_edits import SequenceEdits
from remora.namespaces.snapshot import decode_snapshot, encode_snapshot
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import BlockHash, HoldId, LeaseId, NamespaceId

__all__ = ["CopyBlocks", "Effect", "PoolState", "PoolStateConfig", "SetGeneration", "ZeroBlocks"]


class PoolState:
    """Extents, blocks, prefixes, quotas, leases, sequences and parked admissions of one device.

    Not thread-safe: one owner applies one command after another. A broken protocol is answered `Refused` and changes
    nothing. Raises ConfigError for a configuration that cannot be.
    """

    def __init__(self, config: PoolStateConfig) -> None:
        self._use(PoolParts(config))

    def _use(self, parts: PoolParts) -> None:
        self._parts = parts
        self._admission = Admission(parts)
        self._growth = Growth(parts)
        self._membership = Membership(parts, self._admission)
        self._compaction = Compaction(parts, self._admission)
        self._quantisation = Quantisation(parts, self._admission)
        self._edits = SequenceEdits(parts, self._admission)

    @property
    def config(self) -> PoolStateConfig:
        return self._parts.config

    def apply(self, command: AnyCommand, now_s: float) -> AnyAnswer:
        """Applies a command. Equal states, commands and times give equal answers and states."""
        self._parts.now_s = now_s
        match command:
            case Attach():
                return self._membership.attach(command)
            case LeaseLost():
                return self._membership.lose(command, now_s)
            case SetQuota():
                return self._membership.set_quota(command, now_s)
            case EndSession():
                self._parts.end_session(command.session_id)
                return Done()
            case Compact():
                return self._compaction.compact(command, now_s)
            case Trim():
                return self._compaction.trim(command, now_s)
            case Quantise():
                return self._quantisation.quantise(command, now_s)
            case Hold():
                held = self._parts.hold(command)
                self._admission.pump(now_s)  # other holds may have run out
                return held
            case Unhold(hold_ids=hold_ids):
                num_ended = self._parts.holds.end(hold_ids)
                self._admission.pump(now_s)
                return Unheld(num_ended=num_ended)
            case Tick():
                self._parts.holds.expire(now_s)
                self._admission.pump(now_s)
                return Done()
            case _:
                lease = self._parts.leases.route(command)
                if not isinstance(lease, Lease):
                    return lease
                answer = self._call(lease, command, now_s)
                lease.record(command.call_no, answer)
                return answer

    def _call(
        self,
        lease: Lease,
        command: AddFormat | Admit | Extend | Publish | Release | Relocated | Detach | SequenceCommand,
        now_s: float,
    ) -> AnyAnswer:
        """The lease's next call."""
        match command:
            case Admit():
                return self._admission.admit(lease, command, now_s)
            case AddFormat():
                return self._membership.add_format(lease, command)
            case Extend():
                answer = self._growth.extend(lease, command)
                if len(self._parts.room) and not self._parts.room.blocked:
                    self._admission.pump(now_s)
                return answer
            case Publish():
                return self._growth.publish(lease, command)
            case Release():
                return self._release(lease, command, now_s)
            case Relocated(event_no=event_no):
                if self._parts.relocations.acknowledge(lease, event_no, now_s):
                    self._admission.pump(now_s)
                return Done()
            case Detach():
                return self._membership.detach(lease, command, now_s)
            case _:
                return self._edits.apply(lease, command, now_s)

    def _release(self, lease: Lease, command: Release, now_s: float) -> Released:
        """Ends sequences, running or parked; unknown ones are long finished and ignored."""
        num_released = 0
        for sequence_id in command.sequence_ids:
            sequence = lease.sequences.get(sequence_id)
            parked = lease.parked.get(sequence_id)
            if sequence is not None:
                self._parts.finish(lease, sequence)
            elif parked is not None:
                self._admission.withdraw(parked)
            else:
                continue
            num_released += 1
        self._admission.pump(now_s)
        return Released(num_released=num_released)

    def take_effects(self) -> tuple[Effect, ...]:
        """What the shell must do to memory before the answers of the commands since the last call leave."""
        effects = tuple(self._parts.ledger.effects)
        self._parts.ledger.effects.clear()
        return effects

    def events_after(self, lease_id: LeaseId, event_no: int) -> tuple[AnyEvent, ...]:
        """The lease's events with higher numbers. Raises StaleLease when the lease is not live."""
        return self._parts.leases.events_after(lease_id, event_no)

    def overdue_leases(self, now_s: float) -> set[LeaseId]:
        """Leases that have not switched to the new places of moved blocks in time: they are to be taken away."""
        return self._parts.relocations.overdue(now_s)

    def generation_words(self) -> tuple[int, ...]:
        """What every generation word of the arena's header must hold, by slot."""
        return tuple(self._parts.leases.generations)

    def leases(self) -> tuple[LeaseReport, ...]:
        """Live leases with their processes."""
        return describe_leases(self._parts)

    @property
    def needs_time(self) -> bool:
        """Whether something ends when its time is over: parked admissions, holds of readers. A `Tick` lets it."""
        return bool(len(self._parts.room) or len(self._parts.holds))

    def held(self, hold_id: HoldId) -> Held:
        """What a reader holds; nothing once that has ended."""
        chain = self._parts.holds.chains.get(hold_id)
        return Held() if chain is None else chain.describe()

    def used_bytes(self) -> dict[NamespaceId, int]:
        """What each namespace's running sequences hold; much cheaper than `describe`."""
        return {name: namespace.used_bytes for name, namespace in self._parts.book.namespaces.items()}

    def kv_precisions(self) -> dict[NamespaceId, KVPrecision | None]:
        """The precision of each namespace's KV, that of its tree; None: its model's."""
        return {name: namespace.path()[0].kv_precision for name, namespace in self._parts.book.namespaces.items()}

    def geometries(self) -> tuple[KVGeometry, ...]:
        """Every geometry that the pool has or had blocks of."""
        return tuple(space.geometry for space in self._parts.extents.spaces.values())

    def find_blocks(self, namespace_id: NamespaceId, fingerprint: bytes, hashes: Sequence[BlockHash]) -> int:
        """How many of the first blocks of a chain are indexed, whoever asks; changes nothing."""
        return count_blocks(self._parts, namespace_id, fingerprint, hashes)

    def find_link(self, block_hash: BlockHash) -> Link | None:
        """The sealed block of that hash, if there is one."""
        return find_link(self._parts, block_hash)

    def find_chain(self, tip: BlockHash) -> Chain | None:
        """All sealed blocks from the root to the one of that hash, if there is one."""
        return find_chain(self._parts, tip)

    def find_tips(self, namespace_ids: Container[NamespaceId]) -> list[BlockHash]:
        """The last blocks of all chains of these namespaces."""
        return find_tips(self._parts, namespace_ids)

    def describe(self) -> PoolReport:
        return describe_pool(self._parts)

    def check_integrity(self) -> None:
        """Raises IntegrityError with the invariant that does not hold. Looks at everything, so only when idle."""
        parts = self._parts
        parts.check_integrity()
        if len(parts.room) and not (parts.ledger.num_referenced or parts.relocations.moves or parts.running.has_claim):
            raise IntegrityError("admissions wait although nothing is referenced")

    def snapshot(self) -> bytes:
        """The whole state; equal states give equal bytes. Effects must have been taken."""
        if self._parts.ledger.effects:
            raise IntegrityError("a snapshot would lose effects that have not been taken")
        return encode_snapshot(self._parts)

    @classmethod
    def restore(cls, snapshot: bytes) -> PoolState:
        """The state that made the snapshot. Raises JournalError for bytes that are no snapshot of this version."""
        state = cls.__new__(cls)
        state._use(decode_snapshot(snapshot))
        return state
