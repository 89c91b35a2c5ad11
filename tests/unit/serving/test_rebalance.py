"""When a request is moved without being asked for, as a function of reports: alone, and in a simulated cluster."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.placement import Candidate, place
from remora.deployments.rebalance import Decision, MovableRequest, Rebalance, ReplicaReport
from remora.platform.base.ids import NamespaceId, PoolId, ReplicaId, RequestId
from remora.platform.base.rebalance_config import RebalanceConfig

NS = NamespaceId("chat")
CONFIG = RebalanceConfig(patience_s=5, settle_s=3, cooldown_s=60, min_gap_tokens=1000)


def report(name: str, pool: str, device: int, *, waiting: int = 0, parked: int = 0) -> ReplicaReport:
    return ReplicaReport(
        replica_id=ReplicaId(name), pool_id=PoolId(pool), device_tokens=device, waiting_tokens=waiting + parked,
        parked_tokens=parked,
    )  # fmt: skip


def request(name: str, at: str, num_tokens: int, *, started: bool = True) -> MovableRequest:
    return MovableRequest(
        request_id=RequestId(name), replica_id=ReplicaId(at), namespace_id=NS, num_tokens=num_tokens,
        has_started=started,
    )  # fmt: skip


UNEVEN = [report("a", "p", 9000), report("b", "q", 1000)]
REQUESTS = [request("small", "a", 100), request("large", "a", 3000), request("huge", "a", 5000), request("x", "b", 9)]


def decide_after(
    rules: Rebalance,
    replicas: Sequence[ReplicaReport],
    requests: Sequence[MovableRequest],
    *,
    at_s: float = 0.0,
    free: dict[tuple[PoolId, NamespaceId], int] | None = None,
) -> Decision | None:
    """What is decided once the reports have stood for the patience."""
    assert rules.decide(at_s, replicas, requests, free) is None
    decision = rules.decide(at_s + CONFIG.patience_s, replicas, requests, free)
    rules.check_integrity()
    return decision


def test_the_largest_request_that_does_not_turn_the_order_goes_to_the_idle_device() -> None:
    assert decide_after(Rebalance(CONFIG), UNEVEN, REQUESTS) == (RequestId("large"), ReplicaId("b"), "load")


def test_nothing_moves_before_a_state_has_lasted() -> None:
    rules = Rebalance(CONFIG)
    even = [report("a", "p", 5000), report("b", "q", 5000)]
    for second in range(0, 40, 4):
        assert rules.decide(float(second), UNEVEN if second % 8 else even, REQUESTS) is None


def test_giving_away_stops_at_the_smaller_ratio_and_needs_the_larger_one_to_begin_again() -> None:
    between = [report("a", "p", 4200), report("b", "q", 2000)]
    assert decide_after(Rebalance(CONFIG), between, REQUESTS) is None
    rules = Rebalance(CONFIG)
    assert decide_after(rules, UNEVEN, REQUESTS) is not None
    assert rules.decide(9.0, between, REQUESTS) == (RequestId("small"), ReplicaId("b"), "load")
    assert rules.decide(13.0, [report("a", "p", 3400), report("b", "q", 2000)], [request("y", "a", 9)]) is None
    assert rules.decide(30.0, between, [request("y", "a", 9)]) is None


def test_reports_catch_up_between_two_moves_and_a_moved_request_stays() -> None:
    rules = Rebalance(CONFIG)
    assert decide_after(rules, UNEVEN, REQUESTS) is not None
    assert rules.decide(7.9, UNEVEN, REQUESTS) is None
    turned = [report("a", "p", 1000), report("b", "q", 9000)]
    moved = [request("large", "b", 3000), request("other", "b", 3000)]
    assert decide_after(rules, turned, moved, at_s=20.0) is None, "nothing goes back, that request or another"
    assert rules.decide(64.9, turned, moved) is None
    assert rules.decide(65.1, turned, moved) == (RequestId("other"), ReplicaId("a"), "load")


def test_a_request_that_was_moved_for_another_reason_stays_as_well() -> None:
    rules = Rebalance(CONFIG)
    rules.note_moved(RequestId("large"), 0.0)
    decision = decide_after(rules, UNEVEN, REQUESTS)
    assert decision is not None
    assert decision.request_id == "small"


def test_between_replicas_of_one_device_only_what_waits_is_moved() -> None:
    running = [report("a", "p", 9000), report("b", "p", 9000)]
    assert decide_after(Rebalance(CONFIG), running, REQUESTS) is None
    waiting = [report("a", "p", 2000, waiting=9000), report("b", "p", 2000)]
    requests = [*REQUESTS, request("new", "a", 2000, started=False), request("newer", "a", 2000, started=False)]
    assert decide_after(Rebalance(CONFIG), waiting, REQUESTS) is None
    assert decide_after(Rebalance(CONFIG), waiting, requests) == (RequestId("newer"), ReplicaId("b"), "load")


def test_requests_that_lack_memory_go_where_there_is_twice_their_room() -> None:
    replicas = [report("a", "p", 3000, parked=500), report("b", "q", 3000), report("c", "p", 3000)]
    requests = [request("runs", "a", 800), request("waits", "a", 500, started=False)]
    rules = Rebalance(CONFIG)
    assert rules.lacks_memory(replicas)
    assert decide_after(rules, replicas, requests, free={(PoolId("q"), NS): 999}) is None
    free = {(PoolId("q"), NS): 1000}
    assert decide_after(Rebalance(CONFIG), replicas, requests, free=free) == (
        RequestId("waits"), ReplicaId("b"), "memory",
    )  # fmt: skip
    assert not rules.lacks_memory([replicas[0], replicas[2]])


def test_neither_full_pools_nor_busy_devices_are_given_more() -> None:
    free = {(PoolId("q"), NS): 10_000}
    requests = [request("waits", "a", 500, started=False)]
    full = [report("a", "p", 3000, parked=500), report("b", "q", 0, parked=1)]
    assert decide_after(Rebalance(CONFIG), full, requests, free=free) is None
    busy = [report("a", "p", 3000, parked=500), report("b", "q", 6000)]
    assert decide_after(Rebalance(CONFIG), busy, requests, free=free) is None
    uneven = [report("a", "p", 9000), report("b", "q", 1000, parked=1)]
    assert decide_after(Rebalance(CONFIG), uneven, REQUESTS) is None


@given(
    loads=st.lists(st.integers(0, 20_000), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 9_000), min_size=1, max_size=8),
    num_routers=st.integers(1, 4),
)
def test_routers_that_decide_at_once_never_turn_the_order_of_two_replicas(
    loads: list[int], sizes: list[int], num_routers: int
) -> None:
    replicas = [report(f"r{i}", f"p{i}", load) for i, load in enumerate(loads)]
    source = max(replicas, key=lambda each: each.device_tokens)
    moves = []
    for router in range(num_routers):
        own = [request(f"{router}-{i}", source.replica_id, size) for i, size in enumerate(sizes)]
        decision = decide_after(Rebalance(CONFIG, num_routers=num_routers), replicas, own)
        if decision is not None:
            size = next(each.num_tokens for each in own if each.request_id == decision.request_id)
            moves.append((decision.target, size))
    for target in {target for target, _ in moves}:
        moved = sum(size for to, size in moves if to == target)
        before = next(each.device_tokens for each in replicas if each.replica_id == target)
        assert before + moved <= source.device_tokens - moved


# ---- a simulated cluster ---------------------------------------------------------------------------------------------

TICK_S = 0.25
DEVICE_TOKENS_PER_S = 400.0
NUM_SLOTS = 8


@dataclass
class Job:
    name: str
    num_prompt: int
    num_output: int
    arrived_s: float
    replica: str = ""
    num_computed: float = 0.0
    num_moves: int = 0
    moved_s: float = -1e9
    ended_s: float | None = None

    @property
    def num_left(self) -> float:
        return self.num_prompt + self.num_output - self.num_computed

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + max(0, int(self.num_computed) - self.num_prompt)

    @property
    def started(self) -> bool:
        return self.num_computed > self.num_prompt


@dataclass
class World:
    """Devices of one replica each. Reports are a second old, and a move costs the target all tokens so far."""

    num_replicas: int
    rules: Rebalance | None
    jobs: list[Job] = field(default_factory=list)
    now_s: float = 0.0
    moves: list[tuple[float, str, str]] = field(default_factory=list)
    reports: list[ReplicaReport] = field(default_factory=list)

    def names(self) -> list[str]:
        return [f"r{i}" for i in range(self.num_replicas)]

    def at(self, name: str) -> list[Job]:
        return [job for job in self.jobs if job.replica == name and job.ended_s is None]

    def arrive(self, job: Job, replica: str | None = None) -> None:
        if replica is None:
            candidates = [
                Candidate(replica_id=ReplicaId(name), pool_id=PoolId(name), load_tokens=sum(
                    each.num_prompt + min(each.num_output, 256) for each in self.at(name)
                ))
                for name in self.names()
            ]  # fmt: skip
            replica = str(place(job.name.encode(), candidates, job.num_prompt + min(job.num_output, 256)).replica_id)
        job.replica = replica
        self.jobs.append(job)

    def tick(self) -> None:
        self.now_s += TICK_S
        for name in self.names():
            running = self.at(name)[:NUM_SLOTS]
            for job in running:
                job.num_computed += DEVICE_TOKENS_PER_S * TICK_S / len(running)
                if job.num_left <= 0:
                    job.ended_s = self.now_s
        if self.now_s % 1.0 == 0:
            if self.rules is not None and self.reports:
                self._rebalance(self.rules)
            self.reports = [self._report(name) for name in self.names()]

    def _report(self, name: str) -> ReplicaReport:
        jobs = self.at(name)
        running, waiting = jobs[:NUM_SLOTS], jobs[NUM_SLOTS:]
        return report(
            name, name, sum(job.num_tokens for job in running), waiting=sum(job.num_tokens for job in waiting)
        )

    def _rebalance(self, rules: Rebalance) -> None:
        alive = {job.name: job for job in self.jobs if job.ended_s is None}
        movable = [request(job.name, job.replica, job.num_tokens, started=job.started) for job in alive.values()]
        decision = rules.decide(self.now_s, self.reports, movable)
        rules.check_integrity()
        if decision is not None:
            job = alive[decision.request_id]
            assert self.now_s - job.moved_s >= CONFIG.cooldown_s, f"{job.name} is moved again"
            self.moves.append((self.now_s, job.replica, decision.target))
            job.replica, job.num_moves, job.moved_s = decision.target, job.num_moves + 1, self.now_s
            job.num_prompt, job.num_output = job.num_tokens, int(job.num_left) if job.started else job.num_output
            job.num_computed = 0.0
            # It queues behind what is there.
            self.jobs.remove(job)
            self.jobs.append(job)

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            self.tick()


def job_of(rng: random.Random, number: int, now_s: float) -> Job:
    return Job(f"j{number}", rng.randint(100, 2000), rng.randint(50, 400), now_s)


def test_a_crowded_replica_is_relieved_and_all_ends_sooner() -> None:
    ended_s = {}
    for name, rules in (("left alone", None), ("rebalanced", Rebalance(CONFIG))):
        world, rng = World(4, rules), random.Random(7)
        for number in range(60):
            world.arrive(job_of(rng, number, 0.0), "r0" if number < 48 else None)
        while any(job.ended_s is None for job in world.jobs):
            world.tick()
        ended_s[name] = world.now_s
    assert ended_s["rebalanced"] < 0.6 * ended_s["left alone"]
    assert max(job.num_moves for job in world.jobs) == 1
    assert not [move for move in world.moves if move[2] == "r0"]


@pytest.mark.parametrize("seed", range(3))
def test_under_steady_random_load_hardly_anything_moves_and_nothing_to_and_fro(seed: int) -> None:
    world, rng = World(3, Rebalance(CONFIG)), random.Random(seed)
    number = 0
    mean_tokens = 1050 + 225
    rate_per_s = 0.85 * world.num_replicas * DEVICE_TOKENS_PER_S / mean_tokens
    next_s = 0.0
    while world.now_s < 900:
        while next_s <= world.now_s:
            world.arrive(job_of(rng, number, world.now_s))
            number += 1
            next_s += rng.expovariate(rate_per_s)
        world.tick()
    assert number > 600
    assert len(world.moves) <= 0.03 * number, f"{len(world.moves)} moves of {number} requests"
    for index, (at_s, origin, target) in enumerate(world.moves):
        later = [move for move in world.moves[index + 1 :] if move[0] < at_s + CONFIG.cooldown_s]
        back = [move for move in later if move[1:] == (target, origin)]
        assert not back, f"moves to and fro: {(at_s, origin, target)}, {back}"
