"""A real decoder in stages under the engine: hits, forks, preemption and steps in flight do not change what is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from engine_support import FakeModel, Harness
from stage_support import LocalStages
from tiny_llama import LLAMA_GEOMETRY, SHAPE

from remora.kernels.base import Weights
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.native.library import load_library
from remora.kernels.stages import StagePart
from remora.kernels.weight_sizes import weight_sizes
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.clock import ManualClock
from remora.platform.base.errors import KernelError

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

LLAMA = replace(SHAPE, num_layers=3)
GEOMETRY = KVGeometry(
    groups=(msgspec.structs.replace(LLAMA_GEOMETRY.groups[0], num_layers=3),),
    block_tokens=LLAMA_GEOMETRY.block_tokens,
    rope=LLAMA_GEOMETRY.rope,
)


def random_weights() -> Weights:
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(*size, generator=generator) * 0.18 + ("norm" in name)
        for name, size in weight_sizes(LLAMA).items()
    }
    weights["embed"] *= 4
    return weights | {"rope_inv_freq": 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)}


@pytest.fixture(scope="module")
def whole() -> FakeModel:
    try:
        load_library()
    except KernelError as error:
        pytest.skip(f"no native library: {error}")
    return FakeModel(decoder=NativeDecoder(LLAMA, random_weights(), GEOMETRY, 1), rope_inv_freq=None)


@pytest.fixture(params=[(3,), (1, 2), (1, 1, 1)], ids=str)
def staged(request: pytest.FixtureRequest, whole: FakeModel) -> Iterator[Harness]:
    """Little memory in the last stage: it preempts."""
    from pipeline_world import pipeline

    split: tuple[int, ...] = request.param
    clock, sizes = ManualClock(100.0), [64] * (len(split) - 1) + [16]
    if len(split) == 1:
        one = Harness(model=whole, geometry=GEOMETRY, num_blocks=16, clock=clock, max_step_tokens=48)
        yield one
        one.close()
        return
    geometries = [StagePart(split=split, stage=stage).geometry_of(GEOMETRY) for stage in range(len(split))]
    stages = LocalStages(len(split), sizes=sizes, clock=clock, geometries=geometries)
    memories = [port.memory for port in stages.ports]
    limits = {"max_blocks": 64, "max_in_flight": len(split), "max_micro_tokens": 7}
    with pipeline(LLAMA, split, tables=stages, weights=random_weights(), memories=memories, **limits) as world:
        model = FakeModel(decoder=world.decoder, rope_inv_freq=None)
        one = Harness(model=model, geometry=geometries[0], pool=stages, clock=clock, max_step_tokens=48, max_num_seqs=8)
        yield one
        for _ in range(50):
            one.step()
        assert sum(port.device.state.describe().num_referenced_blocks for port in stages.ports) == 0
        one.close()


def test_stages_say_what_the_whole_model_says(staged: Harness, whole: FakeModel) -> None:
    plain = Harness(model=whole, geometry=GEOMETRY, num_blocks=256, max_step_tokens=512)
    shared = [(7 * i) % 250 for i in range(40)]
    prompts = [[*shared[: 20 + 3 * i], i, 5, 9 * i] for i in range(8)]
    options = [{"max_tokens": 30, **({} if i % 2 else {"temperature": 0.8, "seed": i, "n": 2})} for i in range(8)]
    expected = [plain.submit(prompt, **sampling) for prompt, sampling in zip(prompts, options, strict=True)]
    plain.finish()
    for _ in range(2):  # the second time with what is cached
        ids = [staged.submit(prompt, **sampling) for prompt, sampling in zip(prompts, options, strict=True)]
        staged.finish()
        for ours, theirs, sampling in zip(ids, expected, options, strict=True):
            for choice in range(int(sampling.get("n", 1))):
                output = staged.outputs[ours, choice]
                assert (output.error_message, output.token_ids) == (None, plain.outputs[theirs, choice].token_ids)
    stats = staged.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    plain.close()
