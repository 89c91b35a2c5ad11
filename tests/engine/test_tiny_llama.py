"""The engine on a real decoder: cache, chunks, neighbours and preemption do not change what is said."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import Harness
from tiny_llama import LLAMA_GEOMETRY, tiny_llama

from remora.kernels.native.library import load_library
from remora.platform.base.errors import KernelError

BACKENDS = ["native", "reference"]
BLOCK_TOKENS = LLAMA_GEOMETRY.block_tokens


@pytest.fixture(scope="module", params=BACKENDS)
def model(request):
    if request.param == "native":
        try:
            load_library()
        except KernelError as error:
            pytest.skip(f"no native library: {error}")
    return tiny_llama(request.param)


@pytest.fixture
def harness(model):
    made: list[Harness] = []

    def make(**options) -> Harness:
        made.append(Harness(model=model, geometry=LLAMA_GEOMETRY, **{"num_blocks": 128, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.num_referenced_blocks == 0


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Half of them share a beginning of some blocks."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, 50).tolist()
    return [
        (shared[: int(rng.integers(17, 50))] if i % 2 else []) + rng.integers(0, 256, int(rng.integers(1, 40))).tolist()
        for i in range(count)
    ]


def alone(harness, prompt: list[int], **sampling) -> list[int]:
    """A cold run: an engine and a cache of its own, the prompt in one piece."""
    return harness(max_step_tokens=512).run(prompt, **sampling).token_ids


def test_case_02_greedy_text_is_equal_with_a_cold_and_a_warm_cache(harness) -> None:
    warm = harness()
    num_cached = 0
    for prompt in prompts(16):
        output = warm.run(prompt, max_tokens=24)
        assert output.token_ids == alone(harness, prompt, max_tokens=24)
        num_cached += output.num_cached_tokens
    assert num_cached >= 4 * BLOCK_TOKENS


@pytest.mark.parametrize("budget", [5, 16, 33])
def test_greedy_text_is_equal_however_the_prompt_is_cut(harness, budget) -> None:
    for prompt in prompts(6, seed=1):
        assert harness(max_step_tokens=budget).run(prompt, max_tokens=16).token_ids == alone(
            harness, prompt, max_tokens=16
        )


def test_case_06_greedy_and_seeded_texts_are_equal_alone_and_with_neighbours(harness) -> None:
    one = harness(max_step_tokens=48)
    options = [{"max_tokens": 20, **({} if i % 2 else {"temperature": 0.8, "seed": i, "top_p": 0.9})} for i in range(8)]
    all_prompts = prompts(8, seed=2)
    ids = [one.submit(prompt, **sampling) for prompt, sampling in zip(all_prompts, options, strict=True)]
    one.finish()
    for request_id, prompt, sampling in zip(ids, all_prompts, options, strict=True):
        assert one.outputs[request_id, 0].token_ids == alone(harness, prompt, **sampling)


def test_a_preempted_text_is_equal_to_an_undisturbed_one(harness) -> None:
    tight = harness(num_blocks=12)
    all_prompts = [prompt[:30] for prompt in prompts(6, seed=3)]
    ids = [tight.submit(prompt, max_tokens=60) for prompt in all_prompts]
    tight.finish()
    assert tight.engine.stats().num_preemptions > 0
    for request_id, prompt in zip(ids, all_prompts, strict=True):
        assert tight.outputs[request_id, 0].token_ids == alone(harness, prompt, max_tokens=60)


def test_further_choices_are_equal_to_requests_of_their_own(harness) -> None:
    prompt = prompts(1, seed=4)[0] * 3
    one = harness()
    sampling = {"temperature": 1.0, "seed": 11, "max_tokens": 12, "request_id": "n"}
    one.submit(prompt, n=3, **sampling)
    one.finish()
    for choice in range(3):
        other = harness()
        other.submit(prompt, n=choice + 1, **sampling)
        other.finish()
        assert other.outputs["n", choice].token_ids == one.outputs["n", choice].token_ids


def test_a_sampled_text_goes_on_the_same_after_a_failover(harness) -> None:
    prompt = prompts(2, seed=5)[1]
    sampling = {"temperature": 0.7, "seed": 9, "max_tokens": 30, "repetition_penalty": 1.2}
    whole = alone(harness, prompt, **sampling)
    for num_given in (1, 13, 29):
        assert harness().run(prompt, given=(tuple(whole[:num_given]),), **sampling).token_ids == whole


def test_a_block_outside_the_arena_ends_the_sequence_that_names_it_and_no_other(harness) -> None:
    one = harness()
    bad, good = (one.submit(prompt, max_tokens=12) for prompt in prompts(2))
    one.engine.step()
    broken = one.engine._scheduler.running[0]
    broken.switch_block(0, 12345)
    one.finish()
    assert one.outputs[bad, 0].error == "KernelError"
    assert "block 12345" in one.outputs[bad, 0].error_message
    assert one.outputs[good, 0].token_ids == alone(harness, prompts(2)[1], max_tokens=12)
