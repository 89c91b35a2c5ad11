"""A model in stages says what it says unsplit: with hits, forks, preemption, steps under way and lost stages."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from engine_support import expected_greedy
from stage_support import StagedHarness

from remora.namespaces.commands import Trim
from remora.platform.base.clock import ManualClock
from remora.platform.base.errors import KernelError
from remora.platform.base.ids import LeaseId, NamespaceId

PROMPTS = ["The remora travels with a ray.", "The remora travels alone", "a", "0123456789abcdef", "The remora"]


@pytest.fixture(params=[2, 3])
def two(request: pytest.FixtureRequest) -> Iterator[StagedHarness]:
    harness = StagedHarness(request.param, clock=ManualClock(100.0))
    yield harness
    harness.settle()
    assert harness.num_referenced_blocks == 0, "no block leaks in any pool"
    harness.close()


def run_all(harness: StagedHarness, max_tokens: int = 12) -> None:
    """All prompts at once, and every answer right."""
    names = {harness.submit(prompt, max_tokens=max_tokens): prompt for prompt in PROMPTS}
    harness.finish()
    for name, prompt in names.items():
        output = harness.outputs[name, 0]
        assert (output.error_message, output.token_ids) == (None, expected_greedy(prompt, max_tokens))


def test_a_split_model_says_what_it_says_unsplit(two: StagedHarness) -> None:
    run_all(two)
    assert two.pipeline.most_in_flight == two.pipeline.num_stages, "all lanes were in use"
    stages = two.engine.stats().stages
    assert [each.stage for each in stages] == list(range(two.pipeline.num_stages))
    assert stages[1].num_micro_batches > 12
    assert stages[1].bubble_s == stages[1].compute_s / 2 > 0


def test_a_prefix_that_all_stages_have_is_found(two: StagedHarness) -> None:
    run_all(two)
    output = two.run(PROMPTS[0], max_tokens=4)
    assert output.num_cached_tokens == (len(PROMPTS[0]) - 1) // 4 * 4
    assert output.token_ids == expected_greedy(PROMPTS[0], 4)


def test_what_one_stage_has_evicted_is_computed_again_in_all(two: StagedHarness) -> None:
    run_all(two)
    two.stages.ports[-1].device.apply(Trim(lease_id=LeaseId(""), namespace_id=NamespaceId("ns"), target_bytes=0))
    output = two.run(PROMPTS[0], max_tokens=4)
    assert (output.num_cached_tokens, output.token_ids) == (0, expected_greedy(PROMPTS[0], 4))
    output = two.run(PROMPTS[0], max_tokens=5)
    assert output.num_cached_tokens, "it was published again in the stage that lacked it"


def test_choices_of_one_prompt_share_its_blocks_in_all_stages(two: StagedHarness) -> None:
    name = two.submit(PROMPTS[0], n=3, max_tokens=9)
    two.finish()
    for choice in range(3):
        assert two.outputs[name, choice].token_ids == expected_greedy(PROMPTS[0], 9)


@pytest.mark.parametrize("sizes", [(14, 64, 64), (64, 14, 64), (64, 64, 14), (15, 14, 16)])
def test_memory_that_is_short_in_any_stage_preempts_and_changes_nothing(sizes: tuple[int, ...]) -> None:
    harness = StagedHarness(3, sizes=sizes, clock=ManualClock(100.0))
    run_all(harness, max_tokens=20)
    assert harness.engine.stats().num_preemptions > 0
    harness.settle()
    assert harness.num_referenced_blocks == 0
    harness.close()


def test_a_request_that_is_cancelled_under_way_gives_its_blocks_back_when_its_step_is_over(two: StagedHarness) -> None:
    names = [two.submit(prompt, max_tokens=30) for prompt in PROMPTS]
    two.step(6)
    assert two.pipeline.num_in_flight
    two.cancel(names[0])
    two.cancel(names[3])
    two.finish()
    assert two.outputs[names[0], 0].finish_reason == "abort"
    assert two.outputs[names[1], 0].token_ids == expected_greedy(PROMPTS[1], 30)


def test_blocks_are_not_given_back_while_a_step_under_way_writes_to_them(two: StagedHarness) -> None:
    name = two.submit(PROMPTS[0], max_tokens=30)
    two.step(4)
    while not two.pipeline.num_in_flight:
        two.step()
    two.cancel(name)
    two.step()
    assert two.outputs[name, 0].finish_reason == "abort"
    assert two.pipeline.num_referenced_at_collect > 0
    assert two.num_referenced_blocks == 0


def test_a_stage_that_is_lost_and_comes_back_loses_no_token(two: StagedHarness) -> None:
    names = {two.submit(prompt, max_tokens=25): prompt for prompt in PROMPTS}
    two.step(12)
    num_computed = two.engine.stats().num_prompt_tokens
    two.stages.kill(1)
    two.step(5)
    assert not two.is_done
    assert two.engine.stats().num_running == 0
    for stage in range(1, two.pipeline.num_stages):
        if stage > 1:
            two.stages.kill(stage)
        two.stages.revive(stage)
    two.finish()
    for name, prompt in names.items():
        output = two.outputs[name, 0]
        assert (output.error_message, output.token_ids) == (None, expected_greedy(prompt, 25))
    again = two.engine.stats().num_prompt_tokens - num_computed
    assert again < sum(len(prompt) for prompt in PROMPTS), "what was published was found again"


def test_a_pipeline_that_is_silent_ends_nobody(two: StagedHarness) -> None:
    name = two.submit(PROMPTS[0], max_tokens=20)
    two.step(4)
    two.pipeline.is_lost = True
    two.step(3)
    assert two.outputs[name, 0].finish_reason is None
    two.pipeline.is_lost = False
    for stage in range(1, two.pipeline.num_stages):
        two.stages.kill(stage)
        two.stages.revive(stage)
    two.finish()
    assert two.outputs[name, 0].token_ids == expected_greedy(PROMPTS[0], 20)


def test_a_step_that_fails_takes_nobody_along(two: StagedHarness) -> None:
    bad = PROMPTS[3]

    def trouble(history) -> None:
        if bytes(history[: len(bad)].astype("uint8")).startswith(bad.encode()[: len(history)]) and len(history) == 16:
            raise KernelError("these tokens cannot be computed")

    two.pipeline.trouble = trouble
    names = {prompt: two.submit(prompt, max_tokens=12) for prompt in PROMPTS}
    two.finish()
    for prompt, name in names.items():
        if prompt == bad:
            assert two.outputs[name, 0].error_message is not None
        else:
            assert two.outputs[name, 0].token_ids == expected_greedy(prompt, 12)
    two.pipeline.trouble = lambda history: None


def test_kv_that_is_not_finite_in_a_later_stage_ends_its_sequence_alone(two: StagedHarness) -> None:
    two.pipeline.is_bad = lambda history: len(history) == 9 and history[0] == ord("0")
    names = {prompt: two.submit(prompt, max_tokens=12) for prompt in PROMPTS}
    two.finish()
    for prompt, name in names.items():
        output = two.outputs[name, 0]
        assert output.token_ids == ([] if prompt == PROMPTS[3] else expected_greedy(prompt, 12))
        assert (output.error_message is not None) == (prompt == PROMPTS[3])


@pytest.mark.parametrize("seed", range(3))
def test_answers_from_several_threads_make_no_difference(seed: int) -> None:
    harness = StagedHarness(3, sizes=(20, 16, 18), clock=ManualClock(100.0), delivery="threads", seed=seed)
    names = {harness.submit(prompt, max_tokens=16): prompt for prompt in PROMPTS}
    harness.engine.start()
    deadline_s = time.monotonic() + 30
    while not harness.is_done and time.monotonic() < deadline_s:
        time.sleep(0.005)
    for name, prompt in names.items():
        assert harness.outputs[name, 0].token_ids == expected_greedy(prompt, 16)
    harness.close()
