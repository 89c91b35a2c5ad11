"""Splitting layers over stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.pipeline.split import LayerCosts, balanced_split
from remora.platform.base.errors import ConfigError


def longest_s(costs: list[LayerCosts], split: tuple[int, ...]) -> float:
    times, begin = [], 0
    for stage, count in enumerate(split):
        extra = (costs[stage].embedding_s if stage == 0 else 0) + (
            costs[stage].head_s if stage == len(split) - 1 else 0
        )
        times.append(sum(costs[stage].layer_s[begin : begin + count]) + extra)
        begin += count
    return max(times)


def test_a_head_counts_as_the_layers_that_it_costs() -> None:
    plain = LayerCosts(layer_s=(1.0,) * 16)
    assert balanced_split([plain, plain]) == (8, 8)
    with_head = LayerCosts(layer_s=(1.0,) * 16, head_s=4.0, embedding_s=0.01)
    assert balanced_split([with_head, with_head]) == (10, 6)
    assert balanced_split([with_head]) == (16,)


def test_a_faster_device_gets_more_layers() -> None:
    slow, fast = LayerCosts(layer_s=(1.0,) * 10), LayerCosts(layer_s=(0.25,) * 10)
    assert balanced_split([slow, fast]) == (2, 8)
    assert balanced_split([fast, slow]) == (8, 2)


@given(
    st.lists(st.floats(0.1, 10), min_size=4, max_size=8),
    st.lists(st.floats(0.1, 10), min_size=2, max_size=4),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_no_other_split_has_a_shorter_longest_stage(
    layer_s: list[float], speeds: list[float], embedding_s: float, head_s: float
) -> None:
    costs = [
        LayerCosts(layer_s=tuple(each * speed for each in layer_s), embedding_s=embedding_s, head_s=head_s)
        for speed in speeds
    ]
    split = balanced_split(costs)
    assert len(split) == len(speeds)
    assert sum(split) == len(layer_s)
    assert min(split) >= 1
    others = []
    for ends in combinations(range(1, len(layer_s)), len(speeds) - 1):
        marks = (0, *ends, len(layer_s))
        others.append(tuple(b - a for a, b in pairwise(marks)))
    assert longest_s(costs, split) == pytest.approx(min(longest_s(costs, other) for other in others))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 stages for 2 layers"):
        balanced_split([LayerCosts(layer_s=(1.0, 1.0))] * 3)
