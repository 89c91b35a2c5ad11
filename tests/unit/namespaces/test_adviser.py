"""The capacity adviser against exact replays."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import pytest
from pool_driver import BLOCK_BYTES, Driver, prompt

from remora.namespaces.adviser import _ALL, CapacityAdviser, _bucket, _deepest
from remora.namespaces.replay import replay
from remora.namespaces.trace import TraceRequest, count_unique_blocks, read_trace
from remora.platform.base.ids import BlockHash

FOREVER = 1 << 60


def block_hash(hash_id: int) -> BlockHash:
    return BlockHash(blake2b(hash_id.to_bytes(8, "little"), digest_size=16).digest())


def advised(trace: Sequence[TraceRequest], horizon_blocks: int = FOREVER) -> CapacityAdviser:
    adviser = CapacityAdviser()
    for number, request in enumerate(trace):
        hashes = [block_hash(hash_id) for hash_id in request.hash_ids]
        adviser.look_up(hashes)
        adviser.touch(hashes, float(number), horizon_blocks)
    adviser.check_integrity()
    return adviser


def conversations(seed: int, num_requests: int, num_sessions: int) -> list[TraceRequest]:
    source = random.Random(seed)
    lengths = dict.fromkeys(range(num_sessions), 1)
    trace = []
    for _ in range(num_requests):
        number = min(source.randrange(num_sessions) for _ in range(2))
        lengths[number] += source.randint(0, 3)
        chain = (1, 2, *(1000 * (number + 1) + position for position in range(lengths[number])))
        trace.append(TraceRequest(hash_ids=chain))
    return trace


def test_without_sampling_the_curve_is_that_of_an_exact_replay() -> None:
    trace = conversations(1, 400, 20)
    adviser = advised(trace)
    assert adviser.advice(1, 0.0).sample_rate == 1.0
    for size in (12, 40, 119, 239, 479):
        exact = replay(trace, "lru", size).hit_rate
        # A curve point lies up to an eighth of an octave below the size asked for.
        assert replay(trace, "lru", int(size / 1.125)).hit_rate - 0.001 <= adviser.hit_rate(size) <= exact + 0.001


def test_a_sample_of_a_tenth_is_within_three_points_of_exact_replays() -> None:
    trace = conversations(2, 4000, 1000)
    adviser = advised(trace)
    advice = adviser.advice(1, 0.0)
    assert advice.sample_rate < 0.5
    assert advice.num_sampled <= 2048
    for size in (300, 1000, 3000, 6000):
        assert adviser.hit_rate(size) == pytest.approx(replay(trace, "lru", size).hit_rate, abs=0.03)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_recorded_traces_are_advised_within_three_points(name: str, require_data: Callable[[str], Path]) -> None:
    path = require_data("REMORA_TRACES") / f"mooncake_{name}.jsonl"
    trace = read_trace(path.read_bytes().splitlines())
    adviser = advised(trace)
    unique = count_unique_blocks(trace)
    for share in (0.03, 0.3):
        exact = replay(trace, "lru", int(share * unique)).hit_rate
        assert adviser.hit_rate(int(share * unique)) == pytest.approx(exact, abs=0.03)


def test_the_advised_size_has_all_but_a_twentieth_of_the_best_hit_rate() -> None:
    trace = conversations(3, 600, 40)
    adviser = advised(trace)
    advice = adviser.advice(1, 0.0)
    best = replay(trace, "lru", count_unique_blocks(trace)).hit_rate
    assert replay(trace, "lru", advice.enough_bytes).hit_rate * 1.05 >= best
    assert replay(trace, "lru", int(0.8 * advice.enough_bytes)).hit_rate * 1.05 < best
    rates = [point.hit_rate for point in advice.curve]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(best, abs=0.001)


def test_a_sample_is_bounded_and_forgets_what_no_size_of_interest_could_hold() -> None:
    trace = [TraceRequest(hash_ids=tuple(range(10 * n, 10 * n + 10))) for n in range(2000)]
    unbounded, bounded = advised(trace), advised(trace, horizon_blocks=4096)
    assert unbounded.advice(1, 0.0).sample_rate < 0.15
    assert bounded.advice(1, 0.0).sample_rate > 0.4
    assert bounded.advice(1, 0.0).enough_bytes == 0
    assert bounded.advice(1, 0.0).curve == ()


def test_the_working_set_is_what_was_used_in_the_last_hour() -> None:
    adviser = CapacityAdviser()
    adviser.touch([block_hash(n) for n in range(10)], 0.0, FOREVER)
    adviser.touch([block_hash(n) for n in range(8, 12)], 3000.0, FOREVER)
    assert adviser.advice(100, 3000.0).working_set_bytes == 1200
    assert adviser.advice(100, 4000.0).working_set_bytes == 400


def test_depth_buckets_cover_every_depth_in_order() -> None:
    buckets = [_bucket(depth) for depth in range(1, 5000)]
    assert buckets == sorted(buckets)
    for depth, bucket in enumerate(buckets, 1):
        assert depth <= _deepest(bucket) <= 1.125 * depth + 1
        assert _bucket(_deepest(bucket)) == bucket


def test_an_adviser_goes_on_from_its_dump_as_if_nothing_had_happened() -> None:
    trace = conversations(4, 3000, 800)
    plain, restored = advised(trace[:2000]), CapacityAdviser()
    restored.load(plain.dump())
    assert restored.dump() == plain.dump()
    for number, request in enumerate(trace[2000:]):
        hashes = [block_hash(hash_id) for hash_id in request.hash_ids]
        for adviser in (plain, restored):
            adviser.look_up(hashes)
            adviser.touch(hashes, float(number), FOREVER)
    assert restored.dump() == plain.dump()
    restored.check_integrity()
    assert plain._state.threshold != _ALL


def test_a_pool_advises_each_namespace_by_its_own_lookups() -> None:
    driver = Driver(num_extents=4)
    driver.namespace("a")
    driver.namespace("b")
    replica = driver.lease()
    for turn in range(6):
        for number in range(3):
            replica.cache(f"{turn}.{number}", "a", [*prompt(5, start=number), 1])
        replica.cache(f"{turn}", "b", [*prompt(2, start=10 + turn), 1])
    advice = driver.report("a").advice
    assert advice.working_set_bytes == 15 * BLOCK_BYTES
    assert advice.enough_bytes == 15 * BLOCK_BYTES
    assert advice.curve[-1].hit_rate == pytest.approx(5 / 6, abs=0.001)
    assert driver.report("b").advice.curve == ()
    driver.restart()
    assert driver.report("a").advice == advice
