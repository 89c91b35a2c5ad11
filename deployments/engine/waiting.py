"""Who is admitted next: priority first, then fairness between namespaces, then the longest known prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from remora.deployments.engine.sequence import Sequence
from remora.deployments.prefix_hints import PrefixHints
from remora.platform.base.ids import NamespaceId

#: How far down a namespace's queue the longest prefix is looked for.
_WINDOW = 8
#: A request passed over this often goes next in its namespace.
_MAX_PASSED_OVER = 16


class WaitingQueue:
    """Sequences in wait, by priority and namespace.

    Service (prompt token computed: 1, output token: 2, over the namespace's weight) is counted per namespace. Of equal
    priority, a namespace may be served while its service is within a quantum of the least served one that waits; among
    those, the longest known prefix goes first, so that locality is used within the bounds of fairness. A namespace that
    was idle starts at the level of the least served active one: idleness saves nothing up.
    """

    def __init__(self, *, quantum_tokens: float, hints: PrefixHints) -> None:
        self._quantum_tokens = quantum_tokens
        self._hints = hints
        self._queues: dict[int, dict[NamespaceId, deque[Sequence]]] = {}
        self._service: dict[NamespaceId, float] = {}
        self._num_live: dict[NamespaceId, int] = {}
        self._num_waiting = 0
        #: Of all that wait here: a log grows only while it runs.
        self.num_tokens = 0
        self._next_arrival_no = 0

    def __len__(self) -> int:
        return self._num_waiting

    # ---- the namespaces' accounts

    def open(self, namespace_id: NamespaceId) -> None:
        """One more live sequence of the namespace, waiting or not."""
        if self._num_live.get(namespace_id, 0) == 0:
            active = [self._service[other] for other, count in self._num_live.items() if count]
            if active:
                self._service[namespace_id] = max(self._service.get(namespace_id, 0.0), min(active))
            else:
                self._service.clear()
                self._service[namespace_id] = 0.0
        self._num_live[namespace_id] = self._num_live.get(namespace_id, 0) + 1

    def close(self, namespace_id: NamespaceId) -> None:
        """One live sequence less."""
        self._num_live[namespace_id] -= 1

    def charge(self, sequence: Sequence, num_tokens: int, *, is_output: bool) -> None:
        """Counts service that the sequence received."""
        cost = num_tokens * (2.0 if is_output else 1.0) / sequence.live.namespace.weight
        self._service[sequence.namespace_id] += cost

    # ---- the queue

    def push(self, sequence: Sequence) -> None:
        """At the end of its namespace's queue; one that was in the queue before, back to where it stood, and one that
        has run already before all that have not."""
        queue = self._queues.setdefault(sequence.priority, {}).setdefault(sequence.namespace_id, deque())
        self._num_waiting += 1
        self.num_tokens += sequence.num_tokens
        if sequence.arrival_no == 0:
            self._next_arrival_no += 1
            sequence.arrival_no = self._next_arrival_no
            queue.append(sequence)
            return
        place = _place(sequence)
        queue.insert(next((i for i, other in enumerate(queue) if _place(other) > place), len(queue)), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits. Raises ValueError if it does not."""
        self._queues[sequence.priority][sequence.namespace_id].remove(sequence)
        self._forget_empty(sequence)

    def pop(self, may_go: Callable[[NamespaceId, int], bool]) -> Sequence | None:
        """The next to admit, of the namespaces that may go at that priority; None if there is none."""
        for priority in sorted(self._queues, reverse=True):
            queues = self._queues[priority]
            open_ids = [name for name in queues if may_go(name, priority)]
            if not open_ids:
                continue
            least = min(self._service[name] for name in open_ids)
            best: tuple[tuple[bool, int, float, int], Sequence] | None = None
            for name in open_ids:
                if self._service[name] > least + self._quantum_tokens:
                    continue
                candidate = self._first_of(queues[name])
                rank = self._rank(candidate, self._service[name])
                if best is None or rank > best[0]:
                    best = (rank, candidate)
            assert best is not None  # the least served namespace is always within the quantum
            self._take(best[1])
            return best[1]
        return None

    def _rank(self, sequence: Sequence, service: float) -> tuple[bool, int, float, int]:
        prefix = self._hints.num_leading(sequence.hashes)
        return (sequence.num_preemptions > 0, prefix, -service, -sequence.arrival_no)

    def _first_of(self, queue: deque[Sequence]) -> Sequence:
        head = queue[0]
        if len(queue) == 1 or head.num_preemptions or head.num_passed_over >= _MAX_PASSED_OVER:
            return head
        return max(islice(queue, _WINDOW), key=lambda item: (self._hints.num_leading(item.hashes), -item.arrival_no))

    def _take(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.priority][sequence.namespace_id]
        for earlier in queue:
            if earlier is sequence:
                break
            earlier.num_passed_over += 1
        queue.remove(sequence)
        self._forget_empty(sequence)

    def _forget_empty(self, taken: Sequence) -> None:
        self._num_waiting -= 1
        self.num_tokens -= taken.num_tokens
        queues = self._queues[taken.priority]
        if not queues[taken.namespace_id]:
            del queues[taken.namespace_id]
        if not queues:
            del self._queues[taken.priority]


def _place(sequence: Sequence) -> tuple[bool, int]:
    return (sequence.num_preemptions == 0, sequence.arrival_no)
