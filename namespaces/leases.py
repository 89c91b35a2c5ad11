"""Leases: numbered calls, answers kept for replay, events, tombstones, generation words.

A call takes effect once: the next number is applied, a number seen before gets its old answer, anything else is
refused. Tombstones of finished sequences make late calls about them harmless.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from remora.namespaces.command_base import Command
from remora.namespaces.commands import (
    Admit,
    Admitted,
    AnyAnswer,
    AnyEvent,
    Attach,
    Attached,
    Denied,
    Granted,
    OverQuota,
    Preempt,
    Refused,
    Relocate,
    RelocateItem,
)
from remora.namespaces.extents import GeometrySpace
from remora.platform.base.errors import IntegrityError, StaleLease
from remora.platform.base.ids import LeaseId, SequenceId

if TYPE_CHECKING:
    from remora.namespaces.sequences import Sequence
    from remora.namespaces.waiting import Parked

#: Answers a lease can ask for again; more unanswered calls than this may not be on their way.
ANSWER_WINDOW = 1024
#: Finished sequences a lease is remembered for.
MAX_TOMBSTONES = 4096
#: Events kept although their sequence is finished, and events kept at all.
MIN_KEPT_EVENTS, MAX_KEPT_EVENTS = 256, 8192
#: Ended leases whose last call can still be replayed; an older one is just unknown.
MAX_ENDED_LEASES = 1024


class LeasedFormat(NamedTuple):
    """One precision in which a lease's sequences may have their KV."""

    space: GeometrySpace
    fingerprint: bytes


class Lease:
    """One replica's registration; LeaseBook owns it."""

    __slots__ = ("answers", "attach", "attached", "events", "finished", "formats", "last_call_no", "next_event_no",
                 "parked", "relocations", "sequences", "space")  # fmt: skip

    def __init__(self, attach: Attach, attached: Attached, space: GeometrySpace) -> None:
        self.attach = attach
        self.attached = attached
        #: That of the attach.
        self.space = space
        self.formats = {space.geometry_id: LeasedFormat(space, attach.fingerprint)}
        self.last_call_no = 1
        self.answers: dict[int, AnyAnswer] = {}
        self.events: deque[AnyEvent] = deque()
        self.next_event_no = 1
        self.sequences: dict[SequenceId, Sequence] = {}
        self.parked: dict[SequenceId, Parked] = {}
        self.finished: dict[SequenceId, None] = {}
        #: Numbers of `Relocate` events that it has not acknowledged.
        self.relocations: set[int] = set()

    def add_format(self, space: GeometrySpace, fingerprint: bytes) -> None:
        self.formats[space.geometry_id] = LeasedFormat(space, fingerprint)

    def space_of(self, admit: Admit) -> GeometrySpace:
        """Where the admission's blocks are; the caller has checked that the lease has that format."""
        return self.space if admit.geometry_id is None else self.formats[admit.geometry_id].space

    def record(self, call_no: int, answer: AnyAnswer) -> None:
        """The call has taken effect with this answer."""
        self.last_call_no = call_no
        self.answers[call_no] = answer
        self.answers.pop(call_no - ANSWER_WINDOW, None)

    def knows(self, sequence_id: SequenceId) -> bool:
        """Whether the id was used in this lease, as far as it remembers."""
        return sequence_id in self.sequences or sequence_id in self.parked or sequence_id in self.finished

    def bury(self, sequence_id: SequenceId) -> None:
        """Leaves a tombstone."""
        self.finished[sequence_id] = None
        if len(self.finished) > MAX_TOMBSTONES:
            del self.finished[next(iter(self.finished))]

    def tell_granted(self, admitted: Admitted) -> None:
        self._tell(Granted(event_no=self.next_event_no, admitted=admitted))

    def tell_denied(self, over_quota: OverQuota) -> None:
        self._tell(Denied(event_no=self.next_event_no, over_quota=over_quota))

    def tell_preempt(self, sequence_id: SequenceId, reason: str) -> None:
        self._tell(Preempt(event_no=self.next_event_no, sequence_id=sequence_id, reason=reason))

    def tell_relocate(self, items: tuple[RelocateItem, ...]) -> int:
        """Returns the number of the event."""
        event_no = self.next_event_no
        self.relocations.add(event_no)
        self._tell(Relocate(event_no=event_no, items=items))
        return event_no

    def _tell(self, event: AnyEvent) -> None:
        """Appends; the oldest events go once the lease itself has finished with their sequence."""
        self.next_event_no += 1
        self.events.append(event)
        while len(self.events) > MIN_KEPT_EVENTS:
            oldest = self.events[0]
            if len(self.events) <= MAX_KEPT_EVENTS:
                if isinstance(oldest, Denied) or oldest.event_no in self.relocations:
                    break
                if isinstance(oldest, Relocate):
                    self.events.popleft()
                    continue
                id_ = oldest.admitted.sequence_id if isinstance(oldest, Granted) else oldest.sequence_id
                if id_ in self.sequences:
                    break
            self.events.popleft()

    def events_after(self, event_no: int) -> tuple[AnyEvent, ...]:
        if not self.events or self.events[-1].event_no <= event_no:
            return ()
        return tuple(event for event in self.events if event.event_no > event_no)


class LeaseBook:
    """Live leases, ended ones, and the generation counter of every slot of the arena's header."""

    def __init__(self, max_leases: int) -> None:
        self.leases: dict[LeaseId, Lease] = {}
        #: Ended leases: number and answer of the call that ended it, if one did.
        self.ended: dict[LeaseId, tuple[int, AnyAnswer | None]] = {}
        self.generations = [0] * max_leases

    @property
    def reserved_bytes(self) -> int:
        return sum(lease.attach.reserved_bytes for lease in self.leases.values())

    def free_slot(self) -> int | None:
        taken = {lease.attached.lease_slot for lease in self.leases.values()}
        return next((slot for slot in range(len(self.generations)) if slot not in taken), None)

    def route(self, command: Command) -> Lease | AnyAnswer:
        """The lease whose next call this is; or the answer that the call gets without taking effect."""
        lease = self.leases.get(command.lease_id)
        if lease is None:
            call_no, answer = self.ended.get(command.lease_id, (0, None))
            if answer is not None and call_no == command.call_no:
                return answer
            return Refused(error="StaleLease", message=f"no lease {command.lease_id!r} is attached; attach again")
        expected = lease.last_call_no + 1
        if command.call_no == expected:
            return lease
        if command.call_no > expected or command.call_no < 1:
            problem = f"call {command.call_no} came, call {expected} is next"
        else:
            kept = lease.answers.get(command.call_no)
            if kept is not None:
                return kept
            problem = f"call {command.call_no} is too old to be answered again, call {expected} is next"
        return Refused(error="CallOrder", message=f"lease {command.lease_id}: {problem}")

    def route_attach(self, command: Attach) -> AnyAnswer | None:
        """None when the attach may be tried; else its answer."""
        lease = self.leases.get(command.lease_id)
        if command.call_no != 1:
            return Refused(error="CallOrder", message=f"an attach is call 1 of a lease, not call {command.call_no}")
        if lease is not None:
            if lease.attach == command:
                return lease.attached
            return Refused(error="StaleLease", message=f"lease id {command.lease_id!r} is in use by another attach")
        if command.lease_id in self.ended:
            return Refused(error="StaleLease", message=f"lease {command.lease_id!r} has ended; use a new id")
        return None

    def end(self, lease: Lease, call_no: int = 0, answer: AnyAnswer | None = None) -> None:
        """Forgets a lease that holds nothing any more."""
        if lease.sequences or lease.parked:
            raise IntegrityError(f"lease {lease.attach.lease_id} ends while it holds sequences")
        del self.leases[lease.attach.lease_id]
        self.ended[lease.attach.lease_id] = (call_no, answer)
        if len(self.ended) > MAX_ENDED_LEASES:
            del self.ended[next(iter(self.ended))]

    def events_after(self, lease_id: LeaseId, event_no: int) -> tuple[AnyEvent, ...]:
        """Events of a live lease behind `event_no`. Raises StaleLease for any other."""
        lease = self.leases.get(lease_id)
        if lease is None:
            raise StaleLease(f"no lease {lease_id!r} is attached; attach again")
        return lease.events_after(event_no)

    def check_integrity(self) -> None:
        """Raises IntegrityError when two leases share a slot or a generation word does not belong to its lease."""
        slots = [lease.attached.lease_slot for lease in self.leases.values()]
        if len(set(slots)) != len(slots):
            raise IntegrityError("two leases share a slot")
        for lease in self.leases.values():
            if self.generations[lease.attached.lease_slot] != lease.attached.generation:
                raise IntegrityError(f"lease {lease.attach.lease_id} is live under an old generation")
