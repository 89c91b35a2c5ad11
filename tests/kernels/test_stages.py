"""Stages of a model one after the other against the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoder_world import LLAMA, Memory, make_geometry, make_weights, random_tokens

from remora.kernels.base import DecoderShape, StageDecoder, WeightPrecision
from remora.kernels.batch import StepBatch
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.native.library import LIBRARY_VARIABLE
from remora.kernels.reference.decoder import TorchDecoder
from remora.kernels.stages import StagePart, StageWeights
from remora.platform.base.errors import KernelError

SHAPE = replace(LLAMA, num_layers=3, qkv_bias=True)
TOKENS = random_tokens(SHAPE, 70)
BLOCKS = np.array([4, 0, 6, 2, 1], np.int32)
Maker = type[NativeDecoder] | type[TorchDecoder]


@pytest.fixture(autouse=True)
def own_build(native_library: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, str(native_library(False)))


def make_stages(maker: Maker, shape: DecoderShape, split: tuple[int, ...], *, tied: bool) -> list[StageDecoder]:
    weights, geometry = make_weights(shape, tied=tied), make_geometry(shape, "bf16")
    parts = [StagePart(split=split, stage=stage) for stage in range(len(split))]
    return [maker(p.shape_of(shape), StageWeights(weights, p), p.geometry_of(geometry), 2) for p in parts]


def logits_of(stages: list[StageDecoder], shape: DecoderShape, split: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Bits of all logits of a prompt in two chunks, and of the KV of all layers, block by block."""
    geometry = make_geometry(shape, "bf16")
    memories = [Memory(StagePart(split=split, stage=stage).geometry_of(geometry), 7) for stage in range(len(split))]
    batch, logits = StepBatch(max_tokens=70, max_sequences=2, max_blocks=5), b""
    for begin, end in [(0, 33), (33, 70)]:
        batch.clear()
        batch.add(TOKENS[begin:end], first_position=begin, blocks=BLOCKS, logits="all")
        values = None
        for stage, memory in zip(stages, memories, strict=True):
            values = stage.forward_stage(batch, memory, None if values is None else values.copy())
        assert values is not None
        logits += values.tobytes()
    blocks = [memory.data.reshape(7, -1) for memory in memories]
    return logits, np.concatenate(blocks, axis=1).tobytes()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("maker", [NativeDecoder, TorchDecoder])
def test_stages_give_the_bits_of_the_whole_model(maker: Maker, weights: WeightPrecision, tied: bool) -> None:
    shape = replace(SHAPE, weights=weights)
    whole = logits_of(make_stages(maker, shape, (3,), tied=tied), shape, (3,))
    for split in [(1, 2), (2, 1), (1, 1, 1)]:
        assert logits_of(make_stages(maker, shape, split, tied=tied), shape, split) == whole


def test_a_stage_holds_the_weights_of_its_layers_only() -> None:
    shape = replace(SHAPE, weights="bf16")
    first, last = make_stages(NativeDecoder, shape, (1, 2), tied=False)
    assert isinstance(first, NativeDecoder)
    assert isinstance(last, NativeDecoder)
    (whole,) = make_stages(NativeDecoder, shape, (3,), tied=False)
    assert isinstance(whole, NativeDecoder)
    assert first.weight_bytes < last.weight_bytes < whole.weight_bytes
    assert first.weight_bytes + last.weight_bytes <= whole.weight_bytes + 2 * 2 * 64 * 4
    weights = make_weights(shape)
    assert {*StageWeights(weights, StagePart(split=(1, 2), stage=0))} == {
        name
        for name in weights
        if name not in ("lm_head", "final_norm") and not name.startswith(("layers.1", "layers.2"))
    }


@pytest.mark.parametrize("maker", [NativeDecoder, TorchDecoder])
def test_hidden_states_go_to_stages_without_an_embedding_and_only_there(maker: Maker) -> None:
    first, last = make_stages(maker, SHAPE, (1, 2), tied=False)
    batch = StepBatch(max_tokens=4, max_sequences=1, max_blocks=1)
    batch.add([1, 2], first_position=0, blocks=[0])
    geometry = make_geometry(SHAPE, "bf16")
    memory = [Memory(StagePart(split=(1, 2), stage=stage).geometry_of(geometry), 1) for stage in range(2)]
    with pytest.raises(KernelError, match="without an embedding"):
        last.forward(batch, memory[1])
    with pytest.raises(KernelError, match="hidden states"):
        last.forward_stage(batch, memory[1], np.zeros((3, SHAPE.hidden_size), np.float32))
    with pytest.raises(KernelError, match="without an embedding"):
        first.forward_stage(batch, memory[0], np.zeros((2, SHAPE.hidden_size), np.float32))


def test_a_split_must_be_of_the_models_layers() -> None:
    with pytest.raises(ValueError, match="not 3"):
        StagePart(split=(1, 1), stage=0).shape_of(SHAPE)
    with pytest.raises(ValueError, match="no stage 2"):
        StagePart(split=(1, 2), stage=2)
