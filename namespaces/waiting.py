"""Parked admissions: fair between namespaces, first come first served inside one.

Between namespaces the one that uses least above its guarantee, for its weight, is next (`Namespace.standing`): shares
of the memory converge to guarantee plus weighted remainder, however long requests run, and nobody saves up by idling.

When the next one lacks memory, it is passed only by requests within a guarantee, and by those of namespaces that stay
within their fair share (namespaces/fair_share.py); of the latter it lets no more pass than the arena holds. So a
request that has to wait for much memory neither is starved by small ones nor stops everybody else's share.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from remora.namespaces.commands import Admit
from remora.namespaces.leases import Lease
from remora.namespaces.quotas import Namespace
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import NamespaceId

#: Who lacks memory at the head of the room: newcomers of the same kind, and borrowers, do not simply go ahead.
Blocked = Literal["", "guaranteed", "borrowed"]


class Parked:
    """An admission that waits."""

    __slots__ = ("admit", "lease", "namespace", "order_no", "passed_bytes")

    def __init__(self, admit: Admit, lease: Lease, namespace: Namespace, order_no: int, passed_bytes: int = 0) -> None:
        self.admit = admit
        self.lease = lease
        self.namespace = namespace
        self.order_no = order_no
        #: Granted to borrowers behind it while it lacked memory.
        self.passed_bytes = passed_bytes

    @property
    def num_bytes(self) -> int:
        """What it asks for, without regard to what is cached."""
        return self.admit.num_blocks * self.lease.space_of(self.admit).block_bytes


class WaitingRoom:
    """All parked admissions of a pool."""

    def __init__(self) -> None:
        self._queues: dict[NamespaceId, OrderedDict[int, Parked]] = {}
        self._deadlines: list[tuple[float, int, Parked]] = []
        self.next_order_no = 1
        self.blocked: Blocked = ""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Parked]:
        for queue in self._queues.values():
            yield from queue.values()

    def waiting_in(self, namespace: Namespace) -> int:
        return len(self._queues.get(namespace.namespace_id, ()))

    def waiting_bytes(self, namespace: Namespace) -> int:
        """What all in a namespace's line ask for."""
        return sum(parked.num_bytes for parked in self._queues.get(namespace.namespace_id, {}).values())

    def has_line(self, namespace: Namespace) -> bool:
        return namespace.namespace_id in self._queues

    def add(self, parked: Parked) -> int:
        """Parks at the end of the namespace's line; returns the position there, 1 for the first."""
        namespace = parked.namespace
        queue = self._queues.get(namespace.namespace_id)
        if queue is None:
            queue = self._queues[namespace.namespace_id] = OrderedDict()
        queue[parked.order_no] = parked
        self.next_order_no = max(self.next_order_no, parked.order_no + 1)
        parked.lease.parked[parked.admit.sequence_id] = parked
        if parked.admit.deadline_s is not None:
            heapq.heappush(self._deadlines, (parked.admit.deadline_s, parked.order_no, parked))
        return len(queue)

    def remove(self, parked: Parked) -> None:
        """Granted, denied or withdrawn."""
        queue = self._queues[parked.namespace.namespace_id]
        del queue[parked.order_no]
        if not queue:
            del self._queues[parked.namespace.namespace_id]
        del parked.lease.parked[parked.admit.sequence_id]

    def heads(self) -> list[Parked]:
        """First of each namespace's line, the fairest next one first."""
        first = [next(iter(queue.values())) for queue in self._queues.values()]
        return sorted(first, key=lambda parked: (parked.namespace.standing(), parked.order_no))

    def pop_expired(self, now_s: float) -> Parked | None:
        """A parked admission whose deadline has passed; it still has to be removed."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            parked = heapq.heappop(self._deadlines)[2]
            if parked.lease.parked.get(parked.admit.sequence_id) is parked:
                return parked
        return None

    def check_integrity(self) -> None:
        """Raises IntegrityError when lines and leases disagree about who waits."""
        for namespace_id, queue in self._queues.items():
            if not queue or list(queue) != sorted(queue):
                raise IntegrityError(f"the line of namespace {namespace_id} is empty or out of order")
        for parked in self:
            if parked.lease.parked.get(parked.admit.sequence_id) is not parked:
                raise IntegrityError(f"{parked.admit.sequence_id} is parked but its lease does not know it")
