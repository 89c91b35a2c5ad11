"""Replays of traces: the pool's policies, the optimum, and what the recorded traces must give."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.namespaces.eviction import POLICY_NAMES
from remora.namespaces.replay import OPTIMUM, parse_capacity, replay
from remora.namespaces.trace import TraceRequest, count_unique_blocks, read_trace
from remora.platform.base.errors import ConfigError, InvalidRequest


def requests_of(*chains: tuple[int, ...]) -> list[TraceRequest]:
    return [TraceRequest(hash_ids=chain) for chain in chains]


def conversations(seed: int, num_requests: int) -> list[TraceRequest]:
    """Requests of a few growing conversations with a common beginning."""
    source = random.Random(seed)
    lengths = dict.fromkeys(range(30), 1)
    trace = []
    for _ in range(num_requests):
        number = min(source.randrange(30) for _ in range(3))
        lengths[number] += source.randint(0, 3)
        chain = (1, 2, *(1000 * (number + 1) + position for position in range(lengths[number])))
        trace.append(TraceRequest(hash_ids=chain, priority=number % 2))
    return trace


def test_a_hit_is_a_consecutive_prefix() -> None:
    trace = requests_of((1, 2, 3), (4, 5), (1, 2, 3))
    assert replay(trace, "lru", 4).num_hits == 2  # block 3 went, the oldest leaf
    assert replay(trace, "lru", 5).num_hits == 3


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_cache_of_everything_misses_each_block_once(policy: str) -> None:
    trace = conversations(1, 200)
    unique = count_unique_blocks(trace)
    result = replay(trace, policy, unique)
    assert result.num_lookups - result.num_hits == unique
    assert sum(result.hits_by_priority.values()) == result.num_hits
    assert sum(result.lookups_by_priority.values()) == result.num_lookups


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("capacity", [3, 20, 60])
def test_no_policy_beats_the_optimum_and_each_beats_nothing(policy: str, capacity: int) -> None:
    trace = conversations(2, 600)
    assert 0 < replay(trace, policy, capacity).num_hits <= replay(trace, OPTIMUM, capacity).num_hits


def best_possible(trace: list[TraceRequest], capacity: int) -> int:
    """Hits of the best choice of what to keep after each request, by trying all of them."""

    @cache
    def best(number: int, cached: frozenset[int]) -> int:
        if number == len(trace):
            return 0
        chain = trace[number].hash_ids
        hits = next((n for n, block in enumerate(chain) if block not in cached), len(chain))
        pool = sorted(cached.union(chain))
        kept = combinations(pool, min(capacity, len(pool)))
        return hits + max(best(number + 1, frozenset(each)) for each in kept)

    return best(0, frozenset())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=5), st.integers(1, 3))
def test_the_optimum_is_the_best_there_is(turns: list[tuple[int, int]], capacity: int) -> None:
    trace = requests_of(*(tuple(10 * number + place for place in range(length)) for number, length in turns))
    assert replay(trace, OPTIMUM, capacity).num_hits == best_possible(trace, capacity)


@pytest.mark.parametrize(("text", "blocks"), [("10%", 50), ("0.5%", 2), ("7", 7), (" 3 ", 3)])
def test_a_capacity_is_a_share_or_a_number_of_blocks(text: str, blocks: int) -> None:
    assert parse_capacity(text, 500) == blocks


@pytest.mark.parametrize("text", ["", "0", "-1", "0.01%", "ten", "nan%", "inf%", "1.5"])
def test_a_capacity_that_is_neither_is_refused_by_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"capacity: .* is not allowed"):
        parse_capacity(text, 500)


@pytest.mark.parametrize("line", ["{", '{"hash_ids": [1, "a"]}', '{"hash_ids": [-1]}', '{"timestamp": 3}'])
def test_a_line_that_is_no_request_is_refused_by_number(line: str) -> None:
    with pytest.raises(InvalidRequest, match="line 2"):
        read_trace(['{"hash_ids": [1]}', line])


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="policy: 'mru'"):
        replay([], "mru", 1)


# ---- recorded traces -------------------------------------------------------------------------------------------------

CAPACITIES = ("1%", "3%", "10%", "30%")
#: Percent at 3 and 10 % of the unique blocks, from an independent simulation.
KNOWN = {
    ("conversation", "lru"): (12.6, 27.9),
    ("conversation", OPTIMUM): (34.8, 36.6),
    ("synthetic", "lru"): (10.7, 26.2),
    ("synthetic", OPTIMUM): (31.4, 50.6),
}


@pytest.fixture(scope="module")
def hit_rate(require_data: Callable[[str], Path]) -> Callable[[str, str, str], float]:
    """Percent of a recorded trace's blocks that are found, by trace, policy and capacity."""
    folder = require_data("REMORA_TRACES")

    @cache
    def load(name: str) -> list[TraceRequest]:
        return read_trace((folder / f"mooncake_{name}.jsonl").read_bytes().splitlines())

    @cache
    def measure(name: str, policy: str, capacity: str) -> float:
        trace = load(name)
        return 100 * replay(trace, policy, parse_capacity(capacity, count_unique_blocks(trace))).hit_rate

    return measure


@pytest.mark.parametrize(("name", "policy"), KNOWN)
def test_known_hit_rates_are_met(hit_rate: Callable[[str, str, str], float], name: str, policy: str) -> None:
    found = [hit_rate(name, policy, capacity) for capacity in ("3%", "10%")]
    assert found == pytest.approx(KNOWN[(name, policy)], abs=0.06)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_default_is_nowhere_clearly_worse_than_lru(
    hit_rate: Callable[[str, str, str], float], name: str, capacity: str
) -> None:
    assert hit_rate(name, "value", capacity) > hit_rate(name, "lru", capacity) - 0.3


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_default_is_better_than_lru_on_average(hit_rate: Callable[[str, str, str], float], name: str) -> None:
    gains = [hit_rate(name, "value", capacity) - hit_rate(name, "lru", capacity) for capacity in CAPACITIES]
    assert sum(gains) / len(gains) > 0.9
