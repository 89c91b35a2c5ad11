"""Three namespaces that together want twice the pool, in simulated time: docs/quotas.md has the longer run."""

from __future__ import annotations

import pytest

from remora.namespaces.load_simulation import Group, LoadSimulation, served_after_s

#: Guarantee plus weighted part of the remainder: 0.25 + 0.6 / 4, 0.15 + 0.6 / 2, 0 + 0.6 / 4.
FAIR = {"chat": 0.4, "code": 0.45, "batch": 0.15}
#: While `code` is away it keeps its cache within its guarantee: the other two share the rest.
FAIR_WITHOUT_CODE = {"chat": 0.55, "code": 0.0, "batch": 0.3}
AWAY_S, BACK_S, END_S = 45.0, 75.0, 115.0
#: A request of 32 + 10 blocks and one more; of 24 extents of 32 blocks.
LARGEST_OF_CODE = 43 / (24 * 32)


def within_5_percent(shares: dict[str, float]) -> object:
    """Of each share, not of the arena."""
    return pytest.approx(shares, rel=0.05, abs=1e-6)


@pytest.fixture(scope="module")
def simulation() -> LoadSimulation:
    groups = (
        Group(name="chat", guaranteed=0.25, weight=1.0, num_clients=46, prompt_blocks=(4, 16), output_blocks=(2, 12)),
        Group(
            name="code", guaranteed=0.15, weight=2.0, num_clients=24, prompt_blocks=(16, 32), output_blocks=(1, 10),
            active_s=((0.0, AWAY_S), (BACK_S, END_S)),
        ),
        Group(name="batch", guaranteed=0.0, weight=1.0, num_clients=46, prompt_blocks=(2, 10), output_blocks=(4, 20)),
    )  # fmt: skip
    made = LoadSimulation(groups, arena_extents=24, seed=7, step_s=0.031, timeout_s=60.0)
    made.run(END_S, sample_every_s=0.1)
    made.state.check_integrity()
    return made


def test_shares_converge_to_guarantee_plus_weighted_remainder(simulation: LoadSimulation) -> None:
    assert simulation.mean_shares(15.0, AWAY_S) == within_5_percent(FAIR)
    assert simulation.mean_shares(BACK_S + 15.0, END_S) == within_5_percent(FAIR)


def test_what_an_idle_namespace_leaves_is_lent_to_the_others_by_weight(simulation: LoadSimulation) -> None:
    assert simulation.mean_shares(AWAY_S + 20.0, BACK_S) == within_5_percent(FAIR_WITHOUT_CODE)


def test_a_namespace_that_comes_back_has_its_guarantee_within_a_second(simulation: LoadSimulation) -> None:
    waited_s = served_after_s(simulation.samples, "code", BACK_S)
    assert waited_s is not None
    assert waited_s <= 1.0
    assert min(s.shares["code"] for s in simulation.samples if s.time_s > BACK_S + 1.0) > 0.15 - LARGEST_OF_CODE


def test_no_request_fails_that_only_had_to_wait_its_turn(simulation: LoadSimulation) -> None:
    assert set(simulation.num_failed.values()) == {0}
    assert min(simulation.num_finished.values()) > 50
    assert max(simulation.longest_wait_s.values()) < 60.0


def test_models_with_blocks_of_two_sizes_share_as_fairly_and_get_back_as_soon() -> None:
    """Memory changes hands in extents then, which running sequences of the other geometry have to leave."""
    groups = (
        Group(name="chat", guaranteed=0.25, num_clients=44, prompt_blocks=(4, 16), output_blocks=(2, 12)),
        Group(
            name="code", guaranteed=0.25, num_clients=24, prompt_blocks=(8, 20), output_blocks=(1, 10), num_layers=2,
            active_s=((0.0, 30.0), (60.0, 90.0)),
        ),
    )  # fmt: skip
    made = LoadSimulation(groups, arena_extents=24, seed=7, step_s=0.031, timeout_s=60.0)
    made.run(90.0, sample_every_s=0.1)
    made.state.check_integrity()
    for start_s, end_s in ((10.0, 30.0), (70.0, 90.0)):
        assert made.mean_shares(start_s, end_s) == within_5_percent({"chat": 0.5, "code": 0.5})
    waited_s = served_after_s(made.samples, "code", 60.0)
    assert waited_s is not None
    assert waited_s <= 1.0
    assert set(made.num_failed.values()) == {0}


def test_the_same_seed_gives_the_same_run() -> None:
    def samples() -> list[object]:
        group = Group(name="a", guaranteed=0.5, num_clients=9, prompt_blocks=(2, 9), output_blocks=(1, 5))
        made = LoadSimulation((group,), arena_extents=2, seed=3, step_s=0.03, timeout_s=5.0)
        made.run(10.0, sample_every_s=0.5)
        return [*made.samples]

    assert samples() == samples()
