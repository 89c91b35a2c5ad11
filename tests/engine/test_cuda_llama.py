"""The engine on the decoder for GPUs, by emulation, says what it says on the torch reference; tests/gpu: on a card."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from engine_support import FINGERPRINT, Harness
from tiny_llama import LLAMA_GEOMETRY, tiny_llama, tiny_llama_on

from remora.cache_actors.block_loader import ThreadedLoader
from remora.cache_actors.local_pool import LocalDevice
from remora.cache_actors.port import KVSource
from remora.kernels.cuda.runtime import Runtime
from remora.namespaces.commands import AnyAnswer, AnyCommand, Trim
from remora.namespaces.edits import ContextPlan
from remora.platform.base.clock import ManualClock
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId, PoolId

BLOCK_BYTES = LLAMA_GEOMETRY.block_bytes


class DeviceOn(LocalDevice):
    """A pool whose memory is the runtime's: what it does there is in order with the decoder's steps."""

    def __init__(self, runtime: Runtime, *, data_bytes: int, **options: Any) -> None:
        with runtime.turn():
            data = runtime.upload(np.zeros(data_bytes, np.uint8))
        super().__init__(data_bytes=data_bytes, data=data, **options)
        self._runtime = runtime

    def apply(self, command: AnyCommand) -> AnyAnswer:
        with self._runtime.turn():
            return super().apply(command)


class Pair:
    """One engine whose arena and decoder are on the runtime's device, and one as in a process without a GPU."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._models = tiny_llama_on(runtime), tiny_llama("reference")
        self._made: list[Harness] = []

    def make(
        self, *, num_blocks: int = 64, namespaces: tuple[str, ...] = ("ns",), **options: Any
    ) -> tuple[Harness, Harness]:
        """As Harness, with the pools of both."""
        engines = []
        for model, make in zip(self._models, (partial(DeviceOn, self._runtime), LocalDevice), strict=True):
            device = make(data_bytes=num_blocks * BLOCK_BYTES, extent_bytes=8 * BLOCK_BYTES, clock=ManualClock(100.0))
            for name in namespaces:
                device.set_quota(NamespaceId(name), ModelId("model"))
            pool = device.attach(LLAMA_GEOMETRY, model_id=ModelId("model"), fingerprint=FINGERPRINT, relocates=True)
            engines.append(
                Harness(
                    model=model,
                    geometry=LLAMA_GEOMETRY,
                    pool=pool,
                    namespaces=dict.fromkeys(namespaces),
                    clock=ManualClock(100.0),
                    **options,
                )
            )
        self._made += engines
        return engines[0], engines[1]

    def close(self) -> None:
        for one in self._made:
            one.close()
            assert one.num_referenced_blocks == 0


@pytest.fixture(scope="module")
def models(runtime: Runtime) -> Pair:
    return Pair(runtime)


@pytest.fixture
def pair(models: Pair) -> Iterator[Pair]:
    yield models
    models.close()
    models._made.clear()


def tokens_of(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


PROMPTS = [tokens_of(33, 1) + tokens_of(length, 2 + length) for length in (1, 9, 4)] + [tokens_of(5, 9)]


def test_neighbours_prefixes_chunks_and_forks_say_the_same(pair: Pair) -> None:
    said = []
    for one in pair.make(max_step_tokens=24):
        for _ in range(2):  # the second time from the cache
            for prompt in PROMPTS:
                one.submit(prompt, max_tokens=6)
            one.submit(PROMPTS[1], n=3, max_tokens=6, temperature=0.8, seed=4, top_p=0.9)
            one.finish()
        outputs = list(one.outputs.values())
        assert outputs[-1].num_cached_tokens == 32
        said.append([output.token_ids for output in outputs])
    assert said[0] == said[1]
    assert len({tuple(token_ids) for token_ids in said[0]}) > 5


def test_preempted_texts_say_the_same(pair: Pair) -> None:
    said = []
    for one in pair.make(num_blocks=8):
        ids = [one.submit(tokens_of(20, seed), max_tokens=60) for seed in range(4)]
        one.finish()
        assert one.engine.stats().num_preemptions > 0
        said.append([one.outputs[request_id, 0].token_ids for request_id in ids])
    assert said[0] == said[1]


def test_every_precision_of_a_namespace_says_the_same(pair: Pair) -> None:
    names = ("ns", "mixed", "narrow")
    said = []
    for one in pair.make(namespaces=names, precisions={"mixed": ("bf16", "int8"), "narrow": ("int5", "int4")}):
        ids = [one.submit(prompt, namespace=name, max_tokens=5) for name in names for prompt in PROMPTS[1:]]
        one.finish()
        said.append([one.outputs[request_id, 0].token_ids for request_id in ids])
    assert said[0] == said[1]


def test_a_context_that_rolls_says_the_same(pair: Pair) -> None:
    said = []
    for one in pair.make():
        context = ContextPlan(limit_tokens=48, keep_tokens=16)
        output = one.run(PROMPTS[1], max_tokens=24, context=context, ignore_eos=True)
        assert output.context is not None
        assert output.context.removed
        said.append(output.token_ids)
    assert said[0] == said[1]


def test_blocks_that_the_pool_moves_or_another_one_has_say_the_same(pair: Pair) -> None:
    first, second = pair.make()
    expected = second.run(PROMPTS[1], max_tokens=12).token_ids
    # KV of an engine without a GPU, copied into the memory of one.
    loader = ThreadedLoader(lambda _: second.pool.device)
    reader = pair.make(loader=loader)[0]
    source = KVSource(pool_id=PoolId("other"), actor_name="other")
    request_id = reader.submit(PROMPTS[1], max_tokens=12, source=source)
    reader.step_until(lambda: reader.is_done)
    assert reader.outputs[request_id, 0].token_ids == expected
    assert reader.outputs[request_id, 0].num_copied_tokens == 32
    # Two that run on lie apart when those between them are gone; the pool moves one of them.
    long = [first.submit(PROMPTS[1], max_tokens=12)]
    for seed in range(4):
        first.submit(tokens_of(40, 50 + seed), max_tokens=2)
    long.append(first.submit(tokens_of(40, 60), max_tokens=12))
    first.step(4)
    device = first.pool.device
    device.apply(Trim(lease_id=LeaseId(""), namespace_id=NamespaceId("ns"), target_bytes=0))
    assert device.compact(NamespaceId("ns")).num_moving_blocks > 0
    first.finish()
    assert first.outputs[long[0], 0].token_ids == expected
    assert first.outputs[long[1], 0].token_ids == second.run(tokens_of(40, 60), max_tokens=12).token_ids
