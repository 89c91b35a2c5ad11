"""KV that a session has in another precision is converted, not computed: named for what it is, and found again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engine_support import BLOCK_TOKENS, FAKE_GEOMETRY, Harness, Output, expected_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_loads import FAULTS, Source, spoil_from
from tiny_llama import LLAMA_GEOMETRY, tiny_llama

from remora.cache_actors.block_loader import ThreadedLoader
from remora.cache_actors.port import KVSource
from remora.kernels.native.library import load_library
from remora.kernels.reencoder import HostMemory
from remora.kernels.reference.reencode import reencode_blocks
from remora.namespaces.commands import Trim
from remora.namespaces.geometry import KVPrecision
from remora.platform.base.errors import KernelError
from remora.platform.base.ids import LeaseId, NamespaceId, PoolId

OWN = KVSource(pool_id=PoolId("own"), actor_name="pool-own")
PROMPT = [number % 250 for number in range(83)]
NUM_FULL = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
#: The fake decoder looks at V only, so its tokens say whether every block came to its place.
NARROW: KVPrecision = ("int8", "fp32")
NARROWER: KVPrecision = ("int4", "fp32")


class World:
    """An engine whose pool can be read by itself, in pieces of two blocks; a test decides what goes wrong."""

    def __init__(self, num_blocks: int = 200, num_extents: int = 10, **options: Any) -> None:
        geometry = options.get("geometry", FAKE_GEOMETRY)
        loader = ThreadedLoader(lambda _: self.source, piece_bytes=2 * geometry.block_bytes)
        self.one = Harness(num_blocks=num_blocks, num_extents=num_extents, loader=loader, own_pool=OWN, **options)
        self.source = Source(self.one.pool.device)
        self.one.siblings = [None, NARROW, NARROWER]

    def run(self, prompt: list[int] = PROMPT, **options: Any) -> Output:
        """One request to its end; `kept` is what its session had before."""
        request_id = self.one.submit(prompt, **options)
        self.wait(lambda: self.one.is_done)
        return self.one.outputs[request_id, 0]

    def wait(self, condition: Callable[[], bool]) -> None:
        self.one.step_until(condition)

    def check_nothing_is_left(self) -> None:
        self.source.spoil = lambda first, into_NB: None
        self.wait(lambda: not self.one.pool.device.state.needs_time)
        self.one.pool.device.state.check_integrity()
        assert self.one.num_referenced_blocks == 0
        self.one.close()

    def forget(self) -> None:
        self.one.pool.device.apply(Trim(lease_id=LeaseId(""), namespace_id=NamespaceId("ns"), target_bytes=0))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.check_nothing_is_left()


def test_a_session_whose_namespace_changed_precision_has_its_blocks_converted(world: World) -> None:
    world.run()
    world.one.precisions["ns"] = NARROW
    output = world.run(kept=len(PROMPT))
    assert output.token_ids == expected_greedy(PROMPT, 8)
    assert (output.num_converted_tokens, output.num_cached_tokens, output.num_copied_tokens) == (NUM_FULL, NUM_FULL, 0)
    stats = world.one.engine.stats()
    assert (stats.num_converted_tokens, stats.num_prompt_tokens) == (NUM_FULL, 2 * len(PROMPT) - NUM_FULL)


def test_the_next_turn_finds_what_was_converted_and_what_was_computed_behind_it(world: World) -> None:
    first = world.run()
    world.one.precisions["ns"] = NARROW
    log = PROMPT + first.token_ids
    second = world.run([*log, 7, 8, 9], kept=len(log), max_tokens=12)
    third_prompt = [*log, 7, 8, 9, *second.token_ids, 5]
    third = world.run(third_prompt, kept=len(third_prompt) - 1)
    assert third.token_ids == expected_greedy(third_prompt, 8)
    assert third.num_converted_tokens == 0
    assert third.num_cached_tokens == (len(third_prompt) - 2) // BLOCK_TOKENS * BLOCK_TOKENS
    assert world.source.num_holds == 1


def test_strangers_with_the_same_tokens_get_a_miss_and_do_not_disturb(world: World) -> None:
    world.run()
    world.one.precisions["ns"] = NARROW
    world.run(kept=len(PROMPT))
    stranger = world.run()
    assert (stranger.num_cached_tokens, stranger.num_converted_tokens) == (0, 0)
    assert world.run().num_cached_tokens == NUM_FULL, "what the stranger computed is plain, and found plainly"
    again = world.run(kept=len(PROMPT))
    assert (again.num_cached_tokens, again.num_converted_tokens) == (NUM_FULL, 0)


def test_conversion_goes_on_behind_what_is_cached_plainly(world: World) -> None:
    world.run()
    world.one.precisions["ns"] = NARROW
    world.run(PROMPT[:21])
    output = world.run(kept=len(PROMPT))
    assert (output.num_cached_tokens, output.num_converted_tokens) == (NUM_FULL, NUM_FULL - 20)
    again = world.run(kept=len(PROMPT))
    assert (again.num_cached_tokens, again.num_converted_tokens) == (NUM_FULL, 0)
    assert world.run().num_cached_tokens == 20


def test_tokens_that_the_session_did_not_have_are_not_converted(world: World) -> None:
    world.run()
    world.one.precisions["ns"] = NARROW
    assert world.run(kept=41).num_converted_tokens == 40
    assert world.run(kept=3).num_converted_tokens == 0


def test_plain_kv_is_preferred_when_the_precision_comes_back(world: World) -> None:
    world.run()
    world.one.precisions["ns"] = NARROW
    world.run(kept=len(PROMPT))
    world.one.precisions.clear()
    output = world.run(kept=len(PROMPT))
    assert (output.num_cached_tokens, output.num_converted_tokens) == (NUM_FULL, 0)
    assert world.run().num_cached_tokens == NUM_FULL


def test_what_was_converted_outlives_its_source_and_is_computed_when_both_are_gone(world: World) -> None:
    world.run()
    world.one.precisions["ns"] = NARROW
    world.run(kept=len(PROMPT))
    world.forget()
    output = world.run(kept=len(PROMPT))
    assert (output.num_cached_tokens, output.num_converted_tokens) == (0, 0)
    assert output.token_ids == expected_greedy(PROMPT, 8)


def test_a_preempted_sequence_comes_back_to_its_converted_blocks() -> None:
    world = World(num_blocks=80, num_extents=4)
    world.run()
    world.one.precisions["ns"] = NARROW
    prompts = [[*PROMPT, number] for number in range(4)]
    ids = [world.one.submit(prompt, kept=len(PROMPT), max_tokens=90) for prompt in prompts]
    world.wait(lambda: world.one.is_done)
    assert world.one.engine.stats().num_preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert world.one.outputs[request_id, 0].token_ids == expected_greedy(prompt, 90)
    world.check_nothing_is_left()


def test_a_session_of_another_pool_and_precision_is_copied_and_converted() -> None:
    there, here = World(), World()
    there.run()
    here.source.device = there.one.pool.device
    here.one.precisions["ns"] = NARROW
    output = here.run(kept=len(PROMPT), source=OWN)
    assert output.num_converted_tokens == NUM_FULL
    assert output.token_ids == expected_greedy(PROMPT, 8)
    for world in (there, here):
        world.check_nothing_is_left()


@settings(max_examples=40, deadline=None)
@given(
    fault=FAULTS,
    at=st.integers(0, 12),
    num_plain=st.integers(0, 12),
    num_kept=st.integers(0, 90),
    turns=st.lists(st.sampled_from([None, NARROW, NARROWER]), min_size=1, max_size=3),
)
def test_deaths_at_every_stage_of_a_conversion_leave_right_tokens_no_block_and_nothing_half_written(
    fault: str, at: int, num_plain: int, num_kept: int, turns: list[KVPrecision | None]
) -> None:
    world = World()
    world.run()

    for number, precision in enumerate(turns):
        world.one.precisions.clear()
        if precision is not None:
            world.one.precisions["ns"] = precision
        world.source.spoil = lambda first, into_NB: None
        if num_plain:
            world.run(PROMPT[: num_plain * BLOCK_TOKENS + 1], request_id=f"plain{number}")
        world.source.spoil = spoil_from(at, fault, source=world.one, target=world.one, request_id="r0")
        world.source.is_dead = fault == "dead"
        output = world.run(kept=num_kept, request_id=f"r{number}", max_tokens=4)
        if output.finish_reason not in ("abort", "error"):
            assert output.token_ids == expected_greedy(PROMPT, 4)
        assert world.run(request_id=f"stranger{number}", max_tokens=4).num_converted_tokens == 0
    world.check_nothing_is_left()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("precisions", [("bf16", "int8"), ("int8", "bf16"), ("bf16", "int4")])
def test_tokens_after_a_conversion_are_those_of_blocks_that_the_reference_re_encodes(
    backend: str, precisions: tuple[str, str]
) -> None:
    """The oracle: the same request over blocks that torch has re-encoded, put in place of what was computed."""
    if backend == "native":
        try:
            load_library()
        except KernelError as error:
            pytest.skip(f"no native library: {error}")
    source, target = ((each, each) for each in precisions)
    prompt = np.random.default_rng(5).integers(0, 256, 100).tolist()
    num_blocks = 99 // LLAMA_GEOMETRY.block_tokens
    options = {"model": tiny_llama(backend), "geometry": LLAMA_GEOMETRY, "num_blocks": 120}  # type: ignore[arg-type]

    def table(world: World, precision: Any) -> list[int]:
        realms = world.one.pool.device.state._parts.index.realms
        realm = next(r for k, r in realms.items() if k.fingerprint == world.one.fingerprint_in(precision) and r.blocks)
        return [block.index for block in realm.blocks.values()][:num_blocks]

    def memory(world: World, precision: Any) -> HostMemory:
        return HostMemory(world.one.pool.device.data, LLAMA_GEOMETRY.with_precision(precision))

    world = World(**options)
    world.one.siblings = [source, target]
    world.one.precisions["ns"] = source
    world.run(prompt)
    world.one.precisions["ns"] = target
    output = world.run(prompt, kept=len(prompt), logprobs=0, max_tokens=12)
    assert output.num_converted_tokens == num_blocks * LLAMA_GEOMETRY.block_tokens

    oracle = World(**options)
    oracle.one.precisions["ns"] = target
    oracle.run(prompt)
    blocks = np.array(table(oracle, target), np.int32)
    reencode_blocks(memory(world, source), memory(oracle, target), np.array(table(world, source), np.int32), blocks)
    size = LLAMA_GEOMETRY.with_precision(target).block_bytes
    for mine, its in zip(table(world, target), blocks, strict=True):
        here, there = world.one.pool.device.data, oracle.one.pool.device.data
        assert (here[mine * size : (mine + 1) * size] == there[its * size : (its + 1) * size]).all()
    expected = oracle.run(prompt, logprobs=0, max_tokens=12)
    assert expected.num_cached_tokens == output.num_cached_tokens
    assert output.token_ids == expected.token_ids
    if options["model"].decoder.batch_invariant:
        assert output.logprobs == expected.logprobs
    for each in (world, oracle):
        each.check_nothing_is_left()
