"""Clients and engines in simulated time over a real pool: who gets how much memory under a given load.

    client ──► admit ──► (parked) ──► running: a token a step, a block more when the last is full ──► end ──► client
                 ▲                       │ preempted: gives its blocks back at the next step boundary
                 └───────────────────────┘ and asks again for all it had

Each client of a group sends its next request as soon as the last has ended. Everything is a function of the arguments:
lengths come from a seeded source, and time passes only from event to event.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgspec

from remora.namespaces.commands import (
    Admit,
    Admitted,
    Attach,
    Denied,
    Extend,
    Extended,
    ExtendItem,
    Granted,
    OverQuota,
    Preempt,
    ProcessIdentity,
    Publish,
    Quota,
    Release,
    Relocate,
    Relocated,
    Seal,
    SetQuota,
    Tick,
)
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.pool import PoolState, PoolStateConfig
from remora.platform.base.ids import BlockHash, LeaseId, ModelId, NamespaceId, ReplicaId, SequenceId

_BLOCK_TOKENS = 32
_EXTENT_BLOCKS = 32
#: A pool's answer or event is with the engine so much later.
_MESSAGE_S = 0.002


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace with a model of its own, its clients, and when they send requests."""

    name: str
    #: Shares of the arena.
    guaranteed: float
    limit: float = 1.0
    weight: float = 1.0
    num_layers: int = 1
    num_clients: int
    prompt_blocks: tuple[int, int]
    output_blocks: tuple[int, int]
    #: Spans of time in which requests are sent.
    active_s: tuple[tuple[float, float], ...] = ((0.0, float("inf")),)


class Sample(msgspec.Struct, frozen=True):
    """Share of the arena that each group's running sequences use at a time."""

    time_s: float
    shares: dict[str, float]
    #: Groups whose next waiting request would stay within the guarantee.
    owed: frozenset[str] = frozenset()


class _Run(msgspec.Struct, eq=False):
    group: int
    name: SequenceId
    prompt_blocks: int
    output_blocks: int
    asked_s: float
    #: Blocks of output computed so far.
    done_blocks: int = 0
    num_blocks: int = 0
    is_running: bool = False
    has_started: bool = False

    @property
    def needed_blocks(self) -> int:
        """What it asks for: what it has computed so far and a block to go on."""
        return self.prompt_blocks + self.done_blocks + 1


class LoadSimulation:
    """One pool under the load of several groups. `run` advances it; figures are kept by group name."""

    def __init__(
        self, groups: Sequence[Group], *, arena_extents: int, seed: int, step_s: float, timeout_s: float
    ) -> None:
        """`step_s`: how long an engine step takes, i.e. the time for one token of all that runs; `timeout_s`: how long
        a request may wait for memory before it fails."""
        self.groups = groups
        self.now_s = 0.0
        self.samples: list[Sample] = []
        self.num_finished = dict.fromkeys((group.name for group in groups), 0)
        self.num_preempted = dict(self.num_finished)
        #: Requests denied, by group.
        self.num_failed = dict(self.num_finished)
        self.longest_wait_s = dict.fromkeys(self.num_finished, 0.0)
        self._source = Random(seed)
        self._step_s, self._timeout_s = step_s, timeout_s
        unit = _geometry(1).block_bytes
        self._arena_bytes = arena_extents * _EXTENT_BLOCKS * unit
        self.state = PoolState(
            PoolStateConfig(data_bytes=self._arena_bytes, extent_bytes=_EXTENT_BLOCKS * unit, reserved_bytes=0)
        )
        self._numbers = itertools.count(1)
        self._calls = [itertools.count(1) for _ in groups]
        self._event_nos = [0] * len(groups)
        self._runs: dict[SequenceId, _Run] = {}
        self._agenda: list[tuple[float, int, Any, Any]] = []
        for number, group in enumerate(groups):
            self._add(number, group)

    def _add(self, number: int, group: Group) -> None:
        model = ModelId(group.name)
        quota = Quota(
            guaranteed_bytes=int(group.guaranteed * self._arena_bytes),
            limit_bytes=int(group.limit * self._arena_bytes),
            weight=group.weight,
        )
        self._apply(SetQuota(lease_id=LeaseId(""), namespace_id=NamespaceId(group.name), model_id=model, quota=quota))
        self._call(
            number, Attach, replica_id=ReplicaId(group.name), model_id=model, geometry=_geometry(group.num_layers),
            fingerprint=group.name.encode(), process=ProcessIdentity(pid=1, start_time_ticks=0, boot_id=""),
            relocates=True,
        )  # fmt: skip
        for start_s, _ in group.active_s:
            for _ in range(group.num_clients):
                self._at(start_s + self._source.random() * self._step_s, self._send, number)

    def run(self, until_s: float, *, sample_every_s: float) -> None:
        """Lets time pass; takes samples on the way."""
        next_sample_s = self.now_s
        while next_sample_s <= until_s:
            while self._agenda and self._agenda[0][0] <= next_sample_s:
                self.now_s, _, action, argument = heapq.heappop(self._agenda)
                action(argument)
            self.now_s = next_sample_s
            self._apply(Tick(lease_id=LeaseId("")))
            self._hear()
            self.samples.append(Sample(self.now_s, self.shares(), self._owed()))
            next_sample_s += sample_every_s

    def shares(self) -> dict[str, float]:
        """Share of the arena that each group's running sequences use now."""
        used = self.state.used_bytes()
        return {group.name: used[NamespaceId(group.name)] / self._arena_bytes for group in self.groups}

    def _owed(self) -> frozenset[str]:
        used = self.state.used_bytes()
        found = set()
        heads: set[int] = set()
        for run in self._runs.values():  # in the order in which they asked
            if run.is_running or run.group in heads:
                continue
            heads.add(run.group)
            group = self.groups[run.group]
            needed = run.needed_blocks * _geometry(group.num_layers).block_bytes
            if used[NamespaceId(group.name)] + needed <= int(group.guaranteed * self._arena_bytes):
                found.add(group.name)
        return frozenset(found)

    def mean_shares(self, start_s: float, end_s: float) -> dict[str, float]:
        """Means over the samples of a span of time."""
        found = [sample.shares for sample in self.samples if start_s <= sample.time_s < end_s]
        return {group.name: sum(shares[group.name] for shares in found) / len(found) for group in self.groups}

    # ---- clients and engines

    def _send(self, number: int) -> None:
        group = self.groups[number]
        if not any(start_s <= self.now_s < end_s for start_s, end_s in group.active_s):
            return
        name = SequenceId(str(next(self._numbers)))
        run = _Run(
            number, name, self._source.randint(*group.prompt_blocks), self._source.randint(*group.output_blocks),
            self.now_s,
        )  # fmt: skip
        self._ask(run)

    def _ask(self, run: _Run) -> None:
        self._runs[run.name] = run
        answer = self._call(
            run.group, Admit, sequence_id=run.name, namespace_id=NamespaceId(self.groups[run.group].name), hashes=(),
            num_tokens=(run.needed_blocks - 1) * _BLOCK_TOKENS, num_blocks=run.needed_blocks,
            max_blocks=run.prompt_blocks + run.output_blocks + 1,
            deadline_s=None if run.has_started else self.now_s + self._timeout_s,
        )  # fmt: skip
        if isinstance(answer, Admitted):
            self._start(run, answer)
        elif isinstance(answer, OverQuota):
            self._fail(run)
        self._hear()

    def _start(self, run: _Run, admitted: Admitted) -> None:
        name = self.groups[run.group].name
        self.longest_wait_s[name] = max(self.longest_wait_s[name], self.now_s - run.asked_s)
        run.num_blocks, run.is_running, run.has_started = len(admitted.blocks), True, True
        self._at(self.now_s + _MESSAGE_S + _BLOCK_TOKENS * self._step_s, self._block_full, run)

    def _block_full(self, run: _Run) -> None:
        """The sequence has filled a block; it ends, or needs the next."""
        if not run.is_running:
            return
        if run.prompt_blocks + run.done_blocks < run.num_blocks:
            run.done_blocks += 1
        if run.done_blocks >= run.output_blocks:
            self._release(run)
            self.num_finished[self.groups[run.group].name] += 1
            self._at(self.now_s + _MESSAGE_S, self._send, run.group)
            self._hear()
            return
        items = (ExtendItem(sequence_id=run.name, num_blocks=1),)
        answer = self._call(run.group, Extend, items=items)
        assert isinstance(answer, Extended)
        if answer.grants:
            run.num_blocks += 1
            self._at(self.now_s + _BLOCK_TOKENS * self._step_s, self._block_full, run)
        elif not answer.preempted:
            self._at(self.now_s + self._step_s, self._block_full, run)
        self._hear()

    def _release(self, run: _Run) -> None:
        """Publishes what is full, so that it stays cached, and gives everything back."""
        run.is_running = False
        del self._runs[run.name]
        full = run.prompt_blocks + run.done_blocks
        seals = tuple(
            Seal(sequence_id=run.name, position=position, block_hash=BlockHash(f"{run.name}:{position}".encode()))
            for position in range(full)
        )
        self._call(run.group, Publish, seals=seals)
        self._call(run.group, Release, sequence_ids=(run.name,))

    def _preempt(self, run: _Run) -> None:
        if not run.is_running:
            return
        self.num_preempted[self.groups[run.group].name] += 1
        self._release(run)
        again = msgspec.structs.replace(run, name=SequenceId(str(next(self._numbers))), asked_s=self.now_s)
        self._at(self.now_s + _MESSAGE_S, self._ask, again)
        self._hear()

    def _fail(self, run: _Run) -> None:
        del self._runs[run.name]
        self.num_failed[self.groups[run.group].name] += 1
        self._at(self.now_s + 1.0, self._send, run.group)

    def _hear(self) -> None:
        for number in range(len(self.groups)):
            for event in self.state.events_after(_lease(number), self._event_nos[number]):
                self._event_nos[number] = event.event_no
                match event:
                    case Granted(admitted=admitted):
                        self._start(self._runs[admitted.sequence_id], admitted)
                    case Denied(over_quota=over_quota):
                        self._fail(self._runs[over_quota.sequence_id])
                    case Preempt(sequence_id=sequence_id) if sequence_id in self._runs:
                        self._at(self._next_boundary_s(), self._preempt, self._runs[sequence_id])
                    case Relocate(event_no=event_no):
                        self._at(self._next_boundary_s(), self._switch, (number, event_no))

    def _next_boundary_s(self) -> float:
        """When an engine that is told something now has heard it and ends its step."""
        return (self.now_s + _MESSAGE_S) // self._step_s * self._step_s + self._step_s

    def _switch(self, told: tuple[int, int]) -> None:
        number, event_no = told
        self._call(number, Relocated, event_no=event_no)
        self._hear()

    # ---- the pool

    def _call(self, number: int, kind: Any, **fields: Any) -> Any:
        return self._apply(kind(lease_id=_lease(number), call_no=next(self._calls[number]), **fields))

    def _apply(self, command: Any) -> Any:
        answer = self.state.apply(command, self.now_s)
        self.state.take_effects()
        return answer

    def _at(self, time_s: float, action: Any, argument: Any) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._numbers), action, argument))


def served_after_s(samples: Sequence[Sample], name: str, after_s: float) -> float | None:
    """Seconds from `after_s` until a group runs and no request of it that fits its guarantee waits; None: it never is
    so. What then waits is larger than the rest of the guarantee, and borrows."""
    reached: Iterator[float] = (
        s.time_s - after_s for s in samples if s.time_s >= after_s and s.shares[name] and name not in s.owed
    )
    return next(reached, None)


def _lease(number: int) -> LeaseId:
    return LeaseId(f"lease-{number}")


def _geometry(num_layers: int) -> KVGeometry:
    return KVGeometry(
        groups=(LayerGroup(num_layers=num_layers, num_kv_heads=1, head_dim=16),), block_tokens=_BLOCK_TOKENS
    )
