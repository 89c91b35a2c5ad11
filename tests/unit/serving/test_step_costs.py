"""StepCosts: what prompts cost beside sequences that decode is learned from whatever steps there were."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.engine.step_costs import StepCosts

#: Milliseconds of a step itself, of a sequence that decodes, of a token of a prompt: a CPU, a slow CPU, a GPU.
COSTS = [(1.5, 0.7, 0.46), (80.0, 4.0, 5.0), (9.0, 0.02, 0.04)]


def steps(seed: int, count: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(draw.randrange(33), draw.choice([0, 0, 32, 96, 256])) for _ in range(count)]


def learned(costs: tuple[float, float, float], seed: int = 0, noise: float = 0.0, count: int = 60) -> StepCosts:
    draw, it = random.Random(seed), StepCosts()
    for decoding, prompts in steps(seed, count):
        step_s = 1e-3 * (costs[0] + costs[1] * decoding + costs[2] * prompts) * (1 + draw.uniform(0, noise))
        it.observe(decoding, prompts, step_s)
    return it


@pytest.mark.parametrize("costs", COSTS)
@given(seed=st.integers(0, 1000), num_sequences=st.integers(1, 64))
def test_what_a_decoding_step_is_worth_in_prompt_tokens_is_learned(
    costs: tuple[float, float, float], seed: int, num_sequences: int
) -> None:
    wanted = (costs[0] + costs[1] * num_sequences) / costs[2]
    assert learned(costs, seed).tokens_worth(num_sequences) == pytest.approx(wanted, rel=0.2)


@given(seed=st.integers(0, 1000), factor=st.floats(1e-3, 1e3))
def test_only_the_ratios_of_times_matter(seed: int, factor: float) -> None:
    fixed, decode, prompt = COSTS[0]
    slower = learned((fixed * factor, decode * factor, prompt * factor), seed)
    assert slower.tokens_worth(16) == pytest.approx(learned(COSTS[0], seed).tokens_worth(16), rel=1e-3)


@given(seed=st.integers(0, 1000))
def test_steps_that_were_interrupted_for_long_change_little(seed: int) -> None:
    it = learned(COSTS[0], seed, noise=0.3)
    before = it.tokens_worth(16)
    for decoding, prompts in [(16, 0), (16, 64), (16, 0)]:
        it.observe(decoding, prompts, 1.0)
    assert it.tokens_worth(16) == pytest.approx(before, rel=0.35)


def test_a_machine_that_has_become_another_is_learned_anew() -> None:
    it = learned(COSTS[0])
    for decoding, prompts in steps(1, 400):
        it.observe(decoding, prompts, 1e-3 * (9.0 + 0.02 * decoding + 0.04 * prompts))
    assert it.tokens_worth(8) == pytest.approx((9.0 + 0.16) / 0.04, rel=0.2)


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 4096), st.floats(0, 10, allow_subnormal=False)), max_size=40),
    st.integers(1, 1024),
)
def test_whatever_was_measured_the_answer_is_a_number_of_tokens(
    seen: list[tuple[int, int, float]], num_sequences: int
) -> None:
    it = StepCosts()
    for decoding, prompts, step_s in seen:
        it.observe(decoding, prompts, step_s if step_s > 1e-6 else 0.0)
    assert it.tokens_worth(num_sequences) >= 0


def test_steps_that_are_all_alike_leave_the_parts_at_what_is_usual() -> None:
    it = StepCosts()
    assert it.tokens_worth(16) > 0
    for _ in range(500):
        it.observe(8, 32, 0.02)
    assert 8 <= it.tokens_worth(8) <= 40
