"""Each sampler parameter against a plain reference in double precision."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.deployments.engine.draws import seed_of_request, uniform
from remora.deployments.engine.logits import LogitShaper
from remora.deployments.engine.messages import SamplingParams
from remora.deployments.engine.sampler import Sampler, SampleRow, log_sum_exp_rows
from remora.kernels.native import operations
from remora.kernels.native.library import load_library
from remora.platform.base.errors import KernelError

VOCAB = 700


def row_of(params: SamplingParams, *, prompt=(), output=(), seed=1, choice=0, position=5, **more) -> SampleRow:
    shaper = LogitShaper(params, np.array(prompt, np.int32))
    for token_id in output:
        shaper.push(token_id)
    return SampleRow(params=params, shaper=shaper, seed=seed, choice_index=choice, position=position, **more)


def sample_one(logits, row: SampleRow):
    return Sampler(len(logits)).sample(np.asarray(logits, np.float32)[None], [row])[0]


def reference_distribution(logits, params: SamplingParams, prompt=(), output=()) -> np.ndarray:
    """Probabilities after all parameters, as their documentation says, by sorting everything."""
    logits = np.asarray(logits, np.float64).copy()
    for token_id in set(prompt) | set(output):
        value = logits[token_id]
        logits[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, count in Counter(output).items():
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if params.temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(float)
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    if params.min_p > 0:
        p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[p < p[order][before < params.top_p][-1]] = 0
        p /= p.sum()
    return p


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 40, 699, 700, 5000]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (650, -100.0))]),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(PARAMS, TOKENS, TOKENS, st.integers(0, 2**63), st.sampled_from([0.5, 3.0]))
@settings(max_examples=300, deadline=None)
def test_the_token_is_the_one_that_the_reference_distribution_gives_for_the_draw(params, prompt, output, seed, scale):
    logits = np.random.default_rng(seed).normal(0, scale, VOCAB).astype(np.float32)
    row = row_of(params, prompt=prompt, output=output, seed=seed, choice=2, position=9)
    sampled = sample_one(logits, row)
    expected = reference_distribution(logits, params, prompt, output)
    assert expected[sampled.token_id] > 0, "a token that the parameters exclude"
    cumulative = np.cumsum(expected)
    draw = uniform(seed, 2, 9)
    # The draw falls into the token's interval; rounding may move its borders a little.
    assert (
        cumulative[sampled.token_id] - expected[sampled.token_id] - 1e-5 <= draw <= cumulative[sampled.token_id] + 1e-5
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(top_k=7),
        SamplingParams(min_p=0.3, temperature=2.0),
    ],
)
def test_frequencies_over_many_positions_are_those_of_the_distribution(params) -> None:
    logits = np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    expected = reference_distribution(logits, params)
    sampler = Sampler(40)
    num_draws = 4000
    counts = np.zeros(40)
    for position in range(num_draws):
        counts[sampler.sample(logits[None], [row_of(params, position=position)])[0].token_id] += 1
    deviation = np.abs(counts / num_draws - expected)
    assert (deviation <= 5 * np.sqrt(expected * (1 - expected) / num_draws) + 1e-12).all()


def test_plain_draws_fall_into_their_tokens_interval_over_the_whole_vocabulary() -> None:
    logits = np.random.default_rng(8).normal(0, 1, VOCAB).astype(np.float32)
    expected = reference_distribution(logits, SamplingParams())
    cumulative = np.cumsum(expected)
    for position in range(300):
        token_id = sample_one(logits, row_of(SamplingParams(), position=position)).token_id
        draw = uniform(1, 0, position)
        assert cumulative[token_id] - expected[token_id] - 1e-5 <= draw <= cumulative[token_id] + 1e-5


def test_case_24_a_row_is_sampled_alike_alone_and_with_any_neighbours() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (8, 1000)).astype(np.float32)
    all_params = [
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=20, temperature=0.5),
        SamplingParams(min_p=0.1, repetition_penalty=1.3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logit_bias=((5, 9.0),)),
        SamplingParams(logprobs=3),
        SamplingParams(frequency_penalty=1.0, top_p=0.5),
    ]
    rows = [row_of(params, prompt=[1, 2], output=[3, 3], seed=i) for i, params in enumerate(all_params)]
    sampler = Sampler(1000)
    together = sampler.sample(logits, rows)
    alone = [Sampler(1000).sample(logits[i : i + 1], [rows[i]])[0] for i in range(8)]
    backwards = sampler.sample(logits[::-1].copy(), rows[::-1])[::-1]
    assert together == alone == backwards


def test_case_07_choices_of_one_seed_draw_differently_and_repeatably() -> None:
    logits = np.zeros(5000, np.float32)
    tokens = [sample_one(logits, row_of(SamplingParams(), seed=7, choice=choice)).token_id for choice in range(3)]
    again = [sample_one(logits, row_of(SamplingParams(), seed=7, choice=choice)).token_id for choice in range(3)]
    assert tokens == again
    assert len(set(tokens)) == 3


def test_draws_are_uniform_and_differ_in_each_argument() -> None:
    draws = [uniform(seed, choice, position) for seed in range(20) for choice in range(5) for position in range(40)]
    assert len(set(draws)) == len(draws)
    assert min(draws) >= 0
    assert max(draws) < 1
    assert abs(np.mean(draws) - 0.5) < 0.02
    assert seed_of_request("a") != seed_of_request("b")


def native_log_sum_exp(logits_RV):
    try:
        load_library()
    except KernelError as error:
        pytest.skip(f"no native library: {error}")
    return operations.log_sum_exp_rows(logits_RV)


@pytest.mark.parametrize("log_sum_exp", [log_sum_exp_rows, native_log_sum_exp])
def test_logprobs_are_the_models_own_with_the_chosen_token_first(log_sum_exp) -> None:
    logits = np.random.default_rng(1).normal(0, 2, VOCAB).astype(np.float32)
    expected = logits - math.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(temperature=0.7, logit_bias=((11, 50.0),), logprobs=4)
    rows = [row_of(SamplingParams()), row_of(params)]
    _, sampled = Sampler(VOCAB, log_sum_exp).sample(np.stack([logits[::-1], logits]), rows)
    assert sampled.token_id == sampled.logprobs[0].token_id == 11
    top = np.argsort(-logits, kind="stable")[:4]
    assert [entry.token_id for entry in sampled.logprobs[1:]] == top.tolist()
    for entry in sampled.logprobs:
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-4)


def test_no_top_logprobs_means_only_the_chosen_one_and_none_means_none() -> None:
    logits = np.arange(10.0)
    assert len(sample_one(logits, row_of(SamplingParams(temperature=0, logprobs=0))).logprobs) == 1
    assert sample_one(logits, row_of(SamplingParams(temperature=0))).logprobs == ()


def test_more_top_logprobs_than_tokens_gives_all_of_them() -> None:
    assert len(sample_one(np.arange(10.0), row_of(SamplingParams(temperature=0, logprobs=50))).logprobs) == 11


def test_equal_logits_at_the_border_of_top_k_share_their_fate() -> None:
    logits = np.array([0, 5, 5, 5, 1], np.float32)
    seen = {sample_one(logits, row_of(SamplingParams(top_k=2), position=position)).token_id for position in range(200)}
    assert seen == {1, 2, 3}


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    assert sample_one(np.array([1, 7, 7], np.float32), row_of(SamplingParams(temperature=0))).token_id == 1


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gets_an_error_and_its_neighbours_their_tokens(broken) -> None:
    logits = np.tile(np.arange(100, dtype=np.float32), (3, 1))
    logits[1, 40] = broken
    rows = [row_of(SamplingParams(temperature=0)) for _ in range(3)]
    first, second, third = Sampler(100).sample(logits, rows)
    assert (first.token_id, third.token_id) == (99, 99)
    assert second.error is not None
    assert "not finite" in second.error


def test_a_grammars_mask_holds_whatever_the_bias_says() -> None:
    allowed = np.zeros(50, np.bool_)
    allowed[[4, 9]] = True
    row = row_of(SamplingParams(logit_bias=((20, 1000.0),)), allowed_V=allowed)
    assert sample_one(np.zeros(50), row).token_id in (4, 9)


def test_banned_ends_do_not_come_unless_nothing_else_is_left() -> None:
    row = row_of(SamplingParams(temperature=0), banned_token_ids=(2,))
    assert sample_one(np.array([0, 1, 9]), row).token_id == 1
    only_end = np.array([False, False, True])
    row = row_of(SamplingParams(temperature=0), banned_token_ids=(2,), allowed_V=only_end)
    assert sample_one(np.array([0, 1, 9]), row).token_id == 2


def test_a_mask_that_allows_nothing_is_an_error_of_that_row() -> None:
    row = row_of(SamplingParams(), allowed_V=np.zeros(3, np.bool_))
    assert "no token" in (sample_one(np.zeros(3), row).error or "")


def test_logits_are_left_as_they_were() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    before = logits.copy()
    params = SamplingParams(repetition_penalty=2.0, logit_bias=((1, 5.0),), logprobs=2, top_p=0.5)
    Sampler(64).sample(logits, [row_of(params, prompt=[1, 2, 3])])
    assert (logits == before).all()


def test_a_vocabulary_that_fills_no_whole_piece_can_be_drawn_to_its_last_token() -> None:
    logits = np.full(300, -1e9, np.float32)
    logits[299] = 0
    for params in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.9), SamplingParams(min_p=0.5)):
        assert sample_one(logits, row_of(params)).token_id == 299
