"""What prompts may take of a step in which others decode: tokens keep coming, and no prompt starves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from engine_support import BLOCK_TOKENS, FakeDecoder, FakeModel, Harness, expected_greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.deployments.engine import step_runner
from remora.deployments.engine.scheduler import Scheduled
from remora.deployments.engine.sequence import Sequence
from remora.kernels.base import KVMemory
from remora.kernels.batch import StepBatch


@dataclass
class Step:
    """A plan, and who could have decoded in it."""

    decoding: list[Sequence]
    plan: dict[Sequence, int]

    @property
    def prompts(self) -> dict[Sequence, int]:
        return {sequence: count for sequence, count in self.plan.items() if sequence not in self.decoding}


@dataclass
class Watch:
    """The plans of an engine, in which a decoding step of n sequences is worth `worth(n)` tokens of prompts."""

    one: Harness
    worth: Callable[[int], float]
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler = self.one.engine._scheduler
        scheduler._costs.tokens_worth = self.worth  # type: ignore[method-assign]
        plan_step = scheduler.plan_step

        def watched() -> list[Scheduled]:
            decoding = [
                sequence
                for sequence in scheduler.running
                if sequence.num_pending_tokens == 1 and sequence.num_free_slots and sequence.num_computable_tokens
            ]
            plan = plan_step()
            self.steps.append(Step(decoding, dict(plan)))
            return plan

        scheduler.plan_step = watched  # type: ignore[method-assign]


def prompt_of(number: int, length: int) -> str:
    return f"{number:04d}" + "x" * (length - 4)


@given(
    requests=st.lists(
        st.tuples(st.integers(4, 70), st.integers(1, 20), st.integers(0, 6), st.sampled_from("ab"), st.integers(0, 1)),
        min_size=1,
        max_size=10,
    ),
    worth=st.floats(0, 40),
    share=st.sampled_from([0.0, 0.5, 0.75, 1.0]),
)
def test_those_that_decode_do_so_in_each_step_beside_a_bounded_part_of_prompts(requests, worth, share) -> None:
    one = Harness(
        num_blocks=400, max_step_tokens=64, max_num_seqs=8, prompt_share=share, namespaces={"a": None, "b": None}
    )
    watch = Watch(one, lambda num_sequences: worth + num_sequences)
    ids = []
    for number, (length, max_tokens, pause, namespace, priority) in enumerate(requests):
        prompt = prompt_of(number, length)
        ids.append((one.submit(prompt, max_tokens=max_tokens, namespace=namespace, priority=priority), prompt))
        one.step(pause)
    one.finish()
    for step in watch.steps:
        assert set(step.decoding) <= set(step.plan)
        limit = 64 if share == 1 else max(BLOCK_TOKENS, (worth + 8) * share / (1 - share))
        if step.decoding:
            assert sum(step.prompts.values()) <= limit
    # Every token was computed, once, and whoever waited went on in each step that had room for a block.
    computed = sum(sum(step.plan.values()) for step in watch.steps)
    lengths = [length + len(one.outputs[request_id, 0].token_ids) - 1 for (request_id, _), (length, *_) in
               zip(ids, requests, strict=True)]  # fmt: skip
    assert computed == sum(lengths)
    for (request_id, prompt), (_, max_tokens, *_) in zip(ids, requests, strict=True):
        assert one.outputs[request_id, 0].token_ids == expected_greedy(prompt, max_tokens)
    one.close()


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(4, 90), min_size=1, max_size=6))
def test_no_prompt_waits_for_more_than_the_blocks_of_those_before_it(lengths) -> None:
    one = Harness(num_blocks=400, prompt_share=0.0)
    one.submit("decodes", max_tokens=300)
    one.step(2)
    ids = [one.submit(prompt_of(number, length), max_tokens=1) for number, length in enumerate(lengths)]
    one.step()
    num_steps = 1
    for count, request_id in enumerate(ids, 1):
        while not one.outputs[request_id, 0].token_ids:
            one.step()
            num_steps += 1
        assert num_steps <= sum(-(-length // BLOCK_TOKENS) + 1 for length in lengths[:count]) + 1
    one.close()


def test_where_nobody_decodes_prompts_have_the_whole_step(harness) -> None:
    one = harness(num_blocks=300, max_step_tokens=64, prompt_share=0.0)
    one.submit("x" * 150, max_tokens=3)
    one.finish()
    assert one.model.decoder.steps == [[64], [64], [22], [1], [1]]


def test_chunks_beside_tokens_end_with_a_block_or_a_prompt(harness) -> None:
    one = harness(num_blocks=300, prompt_share=0.75)
    watch = Watch(one, lambda num_sequences: 6.0)  # so 18 tokens fit, and 16 are whole blocks
    one.submit("decodes", max_tokens=60)
    one.step(2)
    ends = {prompt_of(number, length): length for number, length in enumerate((34, 9, 50))}
    for prompt in ends:
        one.submit(prompt, max_tokens=1)
    done: dict[Sequence, int] = {}
    one.finish()
    for step in watch.steps[2:]:
        for sequence, count in step.prompts.items():
            done[sequence] = done.get(sequence, 0) + count
            assert done[sequence] % BLOCK_TOKENS == 0 or done[sequence] == sequence.num_prompt_tokens
    assert sorted(done.values()) == sorted(ends.values())
    assert [sum(step.prompts.values()) for step in watch.steps[2:8]] == [16, 16, 15, 16, 16, 14]


def test_namespaces_take_turns_by_weight_however_long_their_prompts_are(harness) -> None:
    one = harness(
        num_blocks=400, prompt_share=0.0, namespaces={"a": None, "b": None, "c": None}, weights={"a": 1.0, "b": 3.0}
    )
    watch = Watch(one, lambda num_sequences: 0.0)
    one.submit("decodes", namespace="c", max_tokens=200)
    one.step(2)
    for number in range(2):
        one.submit(prompt_of(number, 300), namespace="a", max_tokens=1)
    one.step(10)
    for number in range(2, 4):
        one.submit(prompt_of(number, 300), namespace="b", max_tokens=1)
    one.step(1)
    watch.steps.clear()
    one.step(80)
    had = {"a": 0, "b": 0}
    for step in watch.steps:
        for sequence, count in step.prompts.items():
            had[sequence.namespace_id] += count
    assert had["a"] + had["b"] == 80 * BLOCK_TOKENS
    assert 2.7 <= had["b"] / had["a"] <= 3.3
    one.close()


def test_a_more_urgent_prompt_goes_first(harness) -> None:
    one = harness(num_blocks=300, prompt_share=0.0)
    one.submit("decodes", max_tokens=200)
    one.step(2)
    long = one.submit("x" * 200, max_tokens=1)
    one.step(3)
    urgent = one.submit("y" * 40, max_tokens=1, priority=1)
    one.step(12)
    assert one.outputs[urgent, 0].token_ids
    assert not one.outputs[long, 0].token_ids
    one.close()


def test_a_prompt_is_bounded_beside_those_that_decode_in_another_lane(harness) -> None:
    one = harness(num_blocks=300, prompt_share=0.0)
    one.submit("decodes", max_tokens=200)
    one.step(2)
    one.submit("x" * 100, max_tokens=1)
    one.step(1)
    scheduler = one.engine._scheduler
    decoding, behind = scheduler.running
    scheduler.num_lanes = 2
    decoding.num_flying_tokens = 1
    try:
        assert scheduler.plan_step() == [Scheduled(behind, BLOCK_TOKENS)]
    finally:
        scheduler.num_lanes, decoding.num_flying_tokens = 1, 0
    one.close()


class TimedDecoder(FakeDecoder):
    """Each step takes 2 ms, and 1 ms a row."""

    now_s = 0.0

    def forward(self, batch: StepBatch, memory: KVMemory):
        logits_RV = super().forward(batch, memory)
        self.now_s += 0.002 + 0.001 * sum(self.steps[-1])
        return logits_RV


def test_tokens_come_at_most_so_many_times_as_slowly_as_the_share_says(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = TimedDecoder()
    monkeypatch.setattr(step_runner.time, "perf_counter", lambda: decoder.now_s)
    one = harness(
        model=FakeModel(decoder=decoder), num_blocks=400, max_step_tokens=256, max_num_seqs=8, prompt_share=0.75
    )
    for number in range(32):
        one.submit(prompt_of(number, 100), max_tokens=30)
    while not one.outputs["r4", 0].finish_reason:
        one.step()  # it sees what steps cost
    decoder.steps.clear()
    one.finish()
    slow_s = [0.002 + 0.001 * sum(step) for step in decoder.steps if 1 in step]
    # Alone eight sequences take 10 ms a step: with three times as much for prompts, 40.
    assert 0.030 <= max(slow_s) <= 0.041
