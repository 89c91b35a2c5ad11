"""Blocks that come from another pool: the same tokens as without, whatever dies or lies on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engine_support import BLOCK_TOKENS, FAKE_GEOMETRY, Harness, expected_greedy, rolled
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from remora.cache_actors.block_loader import HeldReader, ThreadedLoader
from remora.cache_actors.local_pool import LocalDevice
from remora.cache_actors.port import KVSource
from remora.namespaces.edits import ContextPlan
from remora.namespaces.hold_commands import Hold
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import PoolId

PROMPT = [number % 250 for number in range(83)]
NUM_FULL = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
SOURCE = KVSource(pool_id=PoolId("source"), actor_name="pool-source")
Spoil = Callable[[int, NDArray[np.uint8]], None]


class Reader:
    """The source's reader; `spoil(first, into_NB)` runs after each copy and may raise or change bytes."""

    def __init__(self, inner: HeldReader, spoil: Spoil) -> None:
        self.inner, self.spoil = inner, spoil
        self.path, self.num_blocks, self.block_bytes = inner.path, inner.num_blocks, inner.block_bytes

    def read(self, first: int, into_NB: NDArray[np.uint8]) -> tuple[int, ...]:
        sums = self.inner.read(first, into_NB)
        self.spoil(first, into_NB)
        return sums

    def close(self) -> None:
        self.inner.close()


class Source:
    """Another pool, of which a test decides what goes wrong."""

    def __init__(self, device: LocalDevice) -> None:
        self.device = device
        self.is_dead = False
        self.num_holds = 0
        self.spoil: Spoil = lambda first, into_NB: None

    def hold(self, command: Hold) -> HeldReader:
        self.num_holds += 1
        if self.is_dead:
            raise Unavailable("the pool does not answer: dead")
        return Reader(self.device.hold(command), lambda *read: self.spoil(*read))


class Pools:
    """A pool that has a prompt, and an engine at another pool that may read it there, two blocks at a time."""

    def __init__(self, **target: Any) -> None:
        self.first = Harness()
        self.source = Source(self.first.pool.device)
        loader = ThreadedLoader(lambda _: self.source, piece_bytes=2 * FAKE_GEOMETRY.block_bytes)
        self.second = Harness(loader=loader, **target)

    def run(self, prompt: list[int] = PROMPT, **options: Any) -> Any:
        request_id = self.second.submit(prompt, source=SOURCE, **options)
        self.wait(lambda: self.second.is_done)
        return self.second.outputs[request_id, 0]

    def wait(self, condition: Callable[[], bool]) -> None:
        self.second.step_until(condition)

    def check_nothing_is_left(self) -> None:
        device = self.first.pool.device
        self.wait(lambda: not device.state.needs_time)
        device.state.check_integrity()
        for each in (self.first, self.second):
            assert each.num_referenced_blocks == 0


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools()
    made.first.run(PROMPT)
    yield made
    made.source.spoil = lambda first, into_NB: None
    made.check_nothing_is_left()
    made.first.close()
    made.second.close()


def test_a_prompt_that_another_pool_has_is_copied_and_only_the_last_block_computed(pools: Pools) -> None:
    output = pools.run()
    assert output.token_ids == expected_greedy(PROMPT, 8)
    assert (output.num_copied_tokens, output.num_cached_tokens) == (NUM_FULL, NUM_FULL)
    stats = pools.second.engine.stats()
    assert stats.num_prompt_tokens == len(PROMPT) - NUM_FULL
    assert (stats.num_copied_tokens, stats.num_cached_tokens, stats.num_damaged_blocks) == (NUM_FULL, NUM_FULL, 0)
    again = pools.second.run(PROMPT)
    assert (again.num_copied_tokens, again.num_cached_tokens) == (0, NUM_FULL), "it is published like computed blocks"
    assert pools.source.num_holds == 1


def test_what_this_pool_has_is_not_copied_and_a_source_without_more_is_asked_once(pools: Pools) -> None:
    pools.second.run(PROMPT[:41])
    assert pools.run().num_copied_tokens == NUM_FULL - 40
    stranger = [9, *PROMPT]
    output = pools.run(stranger)
    assert output.token_ids == expected_greedy(stranger, 8)
    assert output.num_copied_tokens == 0
    assert pools.source.num_holds == 2
    assert pools.run(stranger).num_copied_tokens == 0
    assert pools.source.num_holds == 2, "nothing is missing"


def test_a_block_with_a_wrong_checksum_is_computed_with_all_behind_it(pools: Pools) -> None:
    def flip(first: int, into_NB: NDArray[np.uint8]) -> None:
        if first == 6:
            into_NB[1, 5] ^= 1

    pools.source.spoil = flip
    output = pools.run()
    assert output.token_ids == expected_greedy(PROMPT, 8)
    assert output.num_copied_tokens == 7 * BLOCK_TOKENS
    assert pools.second.engine.stats().num_damaged_blocks == 1


def test_case_12_what_was_not_held_until_it_was_copied_is_computed(pools: Pools) -> None:
    device = pools.first.pool.device

    def lose(first: int, into_NB: NDArray[np.uint8]) -> None:
        if first == 4:
            pools.first.clock.advance(60.0)  # type: ignore[attr-defined]
            device.tick()

    pools.source.spoil = lose
    output = pools.run()
    assert output.token_ids == expected_greedy(PROMPT, 8)
    assert output.num_copied_tokens == 6 * BLOCK_TOKENS, "the piece after the loss is not taken"


def test_others_go_on_while_blocks_are_on_their_way(pools: Pools) -> None:
    gate = threading.Event()
    pools.source.spoil = lambda first, into_NB: assert_set(gate)
    slow = pools.second.submit(PROMPT, source=SOURCE)
    assert pools.second.submit([7, 8, 9], request_id="quick") == "quick"
    pools.wait(lambda: pools.second.outputs["quick", 0].finish_reason is not None)
    assert pools.second.outputs[slow, 0].token_ids == []
    gate.set()
    pools.wait(lambda: pools.second.is_done)
    assert pools.second.outputs[slow, 0].token_ids == expected_greedy(PROMPT, 8)


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(20)


def test_case_18_a_request_that_is_cancelled_during_its_load_leaves_nothing_and_nobody_gets_its_late_blocks(
    pools: Pools,
) -> None:
    gate = threading.Event()
    pools.source.spoil = lambda first, into_NB: assert_set(gate)
    request_id = pools.second.submit(PROMPT, source=SOURCE)
    pools.wait(lambda: pools.source.num_holds == 1)
    pools.second.cancel(request_id)
    pools.second.step(3)
    assert pools.second.num_referenced_blocks == 0
    other = [200 - number % 150 for number in range(60 * BLOCK_TOKENS)]
    pools.second.submit(other, request_id="other", max_tokens=3)
    pools.second.step(2)
    gate.set()
    pools.wait(lambda: pools.second.is_done)
    assert pools.second.outputs["other", 0].token_ids == expected_greedy(other, 3)


def test_further_choices_find_what_the_first_one_loaded(pools: Pools) -> None:
    request_id = pools.second.submit(PROMPT, source=SOURCE, n=3)
    pools.wait(lambda: pools.second.is_done)
    for choice_index in range(3):
        assert pools.second.outputs[request_id, choice_index].token_ids == expected_greedy(PROMPT, 8)
    assert pools.source.num_holds == 1


def test_more_loads_at_once_than_threads_all_come_to_their_end(pools: Pools) -> None:
    prompts = [PROMPT[:length] for length in range(21, 81, 5)]
    ids = [pools.second.submit(prompt, source=SOURCE, max_tokens=3) for prompt in prompts]
    pools.wait(lambda: pools.second.is_done)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert pools.second.outputs[request_id, 0].token_ids == expected_greedy(prompt, 3)
    assert pools.second.engine.stats().num_copied_tokens >= 76


def test_an_edited_context_is_copied_with_kv_that_could_not_be_computed_again(pools: Pools) -> None:
    plan = ContextPlan(limit_tokens=64, keep_tokens=8)
    prompt = [number % 199 for number in range(60)]
    expected, context = rolled(prompt, 30, limit=64, keep=8)
    first = pools.first.run(prompt, max_tokens=30, context=plan)
    assert first.token_ids == expected
    assert first.context is not None
    log = context[:-1]
    again = ContextPlan(limit_tokens=64, keep_tokens=8, edits=first.context.edits)
    told = pools.first.run(log, max_tokens=4, context=again)
    moved = pools.run(log, max_tokens=4, context=again)
    assert moved.token_ids == told.token_ids
    assert moved.num_copied_tokens > 8
    assert moved.context is None, "nothing was computed anew"


FAULTS = st.sampled_from(["none", "dead", "raises", "flips", "loses", "cancel", "preempt"])


def spoil_from(at: int, fault: str, *, source: Harness, target: Harness, request_id: str) -> Spoil:
    """What does a fault of FAULTS, other than "dead", to each copy from block `at` on."""

    def spoil(first: int, into_NB: NDArray[np.uint8]) -> None:
        if first < at:
            return
        if fault == "raises":
            raise Unavailable("gone")
        if fault == "flips":
            into_NB[-1, at] ^= 0x80
        elif fault == "loses":
            source.clock.advance(60.0)  # type: ignore[attr-defined]
            source.pool.device.tick()
        elif fault == "cancel":
            target.cancel(request_id)
        elif fault == "preempt":
            limit = 30 * FAKE_GEOMETRY.block_bytes
            target.pool.device.set_quota("ns", "model", limit_bytes=limit)  # type: ignore[arg-type]
            target.pool.device.pass_on_events()

    return spoil


@settings(max_examples=60, deadline=None)
@given(fault=FAULTS, at=st.integers(0, 12), num_known=st.integers(0, 12), num_tokens=st.integers(1, 83))
def test_deaths_at_every_stage_of_a_load_leave_right_tokens_and_no_block(
    fault: str, at: int, num_known: int, num_tokens: int
) -> None:
    pools = Pools(num_blocks=40)
    prompt = PROMPT[:num_tokens]
    pools.first.run(PROMPT)
    if num_known:
        pools.second.run(PROMPT[: num_known * BLOCK_TOKENS + 1])
    pools.source.is_dead = fault == "dead"
    pools.source.spoil = spoil_from(at, fault, source=pools.first, target=pools.second, request_id="r")
    output = pools.run(prompt, request_id="r", max_tokens=4)
    if output.finish_reason != "abort":
        assert output.token_ids == expected_greedy(prompt, 4)
    pools.check_nothing_is_left()
    pools.first.close()
    pools.second.close()
