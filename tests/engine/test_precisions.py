"""One engine, namespaces of several KV precisions: each sequence has one as long as it lives and sees no other's KV."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine_support import FAKE_GEOMETRY, FINGERPRINT, Harness, Output, expected_greedy, rolled
from tiny_llama import LLAMA_GEOMETRY, tiny_llama

from remora.cache_actors.local_pool import LocalDevice
from remora.kernels.native.library import load_library
from remora.namespaces.commands import Trim
from remora.namespaces.edits import ContextPlan
from remora.namespaces.geometry import KVPrecision
from remora.platform.base.clock import ManualClock
from remora.platform.base.errors import KernelError
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId

PROMPT = "The remora travels with a ray."
#: What the fake decoder can keep tokens in: it looks at V only.
NARROW: KVPrecision = ("int8", "fp32")
TWO = {"num_extents": 4, "namespaces": {"wide": None, "narrow": None}, "precisions": {"narrow": NARROW}}


def used_blocks(one: Harness, precision: KVPrecision) -> int:
    geometry_id = one.geometry.with_precision(precision).geometry_id
    report = one.pool.device.state.describe()
    return next(each.num_used_blocks for each in report.geometries if each.geometry_id == geometry_id)


def test_sequences_of_two_precisions_run_in_the_same_steps_each_in_passes_of_its_own(harness) -> None:
    one = harness(**TWO)
    wide = [one.submit(PROMPT + str(number), namespace="wide") for number in range(2)]
    narrow = [one.submit(PROMPT + str(number), namespace="narrow") for number in range(2)]
    one.finish()
    for number, request_id in enumerate([*wide, *narrow]):
        assert one.outputs[request_id, 0].token_ids == expected_greedy(PROMPT + str(number % 2), 8)
    assert {len(rows) for rows in one.model.decoder.steps} == {2}, "no pass has sequences of both"
    assert len(one.model.decoder.steps) == 2 * one.engine.stats().num_steps, "and no step leaves a precision out"


def test_a_prefix_is_found_in_its_own_precision_only(harness) -> None:
    one = harness(**TWO)
    assert one.run(PROMPT, namespace="narrow").num_cached_tokens == 0
    assert one.run(PROMPT, namespace="narrow").num_cached_tokens == 28
    one.precisions.clear()
    assert one.run(PROMPT, namespace="narrow").num_cached_tokens == 0


def test_a_change_of_precision_leaves_running_sequences_theirs_and_gives_new_ones_the_new(harness) -> None:
    one = harness(**TWO)
    old = one.submit(PROMPT, namespace="narrow", max_tokens=40)
    one.step(5)
    one.precisions["narrow"] = ("int4", "fp32")
    new = one.submit(PROMPT, namespace="narrow", max_tokens=40)
    one.step(5)
    assert all(len(rows) == 1 for rows in one.model.decoder.steps)
    assert used_blocks(one, NARROW) > 0
    assert used_blocks(one, ("int4", "fp32")) > 0
    one.finish()
    assert one.outputs[old, 0].token_ids == one.outputs[new, 0].token_ids == expected_greedy(PROMPT, 40)
    one.precisions["narrow"] = NARROW
    assert one.run(PROMPT, namespace="narrow", max_tokens=1).num_cached_tokens == 28, "what is cached is found again"


def test_a_preempted_sequence_comes_back_in_the_precision_it_began_with(harness) -> None:
    one = harness(num_blocks=22, namespaces={"narrow": None}, precisions={"narrow": NARROW})
    first, second = (one.submit(PROMPT + name, namespace="narrow", max_tokens=60) for name in "ab")
    one.step(3)
    one.precisions.clear()
    one.finish()
    assert one.engine.stats().num_preemptions > 0
    assert one.outputs[first, 0].token_ids == expected_greedy(PROMPT + "a", 60)
    assert one.outputs[second, 0].token_ids == expected_greedy(PROMPT + "b", 60)
    assert used_blocks(one, ("fp32", "fp32")) == 0, "nothing was ever computed in the model's own"


def test_hashes_of_a_router_that_missed_the_change_do_no_harm(harness) -> None:
    one = harness(**TWO)
    stale = one.request(PROMPT, namespace="narrow")
    one.precisions["narrow"] = ("int4", "fp32")
    one.outputs[stale.request_id, 0] = Output()
    one.engine.submit(stale)
    one.finish()
    assert one.outputs[stale.request_id, 0].token_ids == expected_greedy(PROMPT, 8)
    assert one.run(PROMPT, namespace="narrow").num_cached_tokens == 28, "it was published under the new root"
    one.precisions["narrow"] = NARROW
    assert one.run(PROMPT, namespace="narrow").num_cached_tokens == 0


def test_a_pass_that_fails_in_one_precision_costs_the_other_nothing(harness) -> None:
    one = harness(**TWO)

    def trouble(history):
        if history[0] == ord("!") and len(history) > 5:
            raise KernelError("that one")

    one.model.decoder.trouble = trouble
    bad = one.submit("!bad", namespace="narrow")
    beside = one.submit(PROMPT, namespace="narrow")
    good = one.submit(PROMPT, namespace="wide")
    one.finish()
    assert one.outputs[bad, 0].error == "KernelError"
    assert one.outputs[beside, 0].token_ids == one.outputs[good, 0].token_ids == expected_greedy(PROMPT, 8)


def test_a_rolling_context_is_moved_within_its_precision(harness) -> None:
    one = harness(**TWO)
    prompt = list(PROMPT.encode())
    plan = ContextPlan(limit_tokens=40, keep_tokens=8)
    output = one.run(prompt, namespace="narrow", max_tokens=60, context=plan)
    assert output.token_ids == rolled(prompt, 60, limit=40, keep=8)[0]


def test_blocks_of_each_precision_move_together_while_their_sequences_run() -> None:
    source, size = random.Random(2), 24 * FAKE_GEOMETRY.block_bytes
    device = LocalDevice(data_bytes=40 * size, extent_bytes=size, clock=ManualClock(100.0))
    for name in TWO["namespaces"]:
        device.set_quota(NamespaceId(name), ModelId("model"))
    pool = device.attach(FAKE_GEOMETRY, model_id=ModelId("model"), fingerprint=FINGERPRINT, relocates=True)
    one = Harness(**TWO, pool=pool, clock=ManualClock(100.0), max_num_seqs=24)
    asked = [
        (prompt, one.submit(prompt, namespace=namespace, max_tokens=source.randint(2, 40)))
        for number in range(40)
        for namespace in TWO["namespaces"]
        for prompt in [f"{number} says {source.randrange(30)}" * source.randint(1, 3)]
    ]
    num_moving = dict.fromkeys(TWO["namespaces"], 0)
    while not one.is_done:
        one.step(5)
        for name in num_moving:
            device.apply(Trim(lease_id=LeaseId(""), namespace_id=NamespaceId(name), target_bytes=0))
            num_moving[name] += device.compact(NamespaceId(name)).num_moving_blocks
    for prompt, request_id in asked:
        said = one.outputs[request_id, 0].token_ids
        assert said == expected_greedy(prompt, len(said))
    assert min(num_moving.values()) > 10
    one.close()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_two_precisions_in_one_batch_say_what_each_says_alone(backend) -> None:
    if backend == "native":
        try:
            load_library()
        except KernelError as error:
            pytest.skip(f"no native library: {error}")
    model = tiny_llama(backend)
    precisions: dict[str, KVPrecision] = {"int8": ("int8", "int8"), "mixed": ("int8", "int4"), "bf16": ("bf16", "bf16")}
    names = ["fp32", *precisions]
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, 40).tolist() for _ in range(2)]

    def make() -> Harness:
        return Harness(
            model=model,
            geometry=LLAMA_GEOMETRY,
            num_blocks=160,
            num_extents=8,
            namespaces=dict.fromkeys(names),
            precisions=precisions,
            max_step_tokens=64,
        )

    together = make()
    asked = [
        (name, prompt, together.submit(prompt, namespace=name, max_tokens=12, logprobs=0))
        for name in names
        for prompt in prompts
    ]
    together.finish()
    for name, prompt, request_id in asked:
        alone = make()
        expected = alone.run(prompt, namespace=name, max_tokens=12, logprobs=0)
        got = together.outputs[request_id, 0]
        assert got.token_ids == expected.token_ids, name
        if model.decoder.batch_invariant:
            assert got.logprobs == expected.logprobs, name
        alone.close()
    together.close()
    assert together.num_referenced_blocks == 0
    exact, rounded = (together.outputs[asked[index][2], 0].logprobs for index in (0, 2))
    assert exact != rounded, "int8 is another precision"
