"""TorchDecoder against Hugging Face transformers, the oracle for logits."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from decoder_world import Memory, make_geometry, run
from hf_world import expected_logits, make_model, shape_and_weights

from remora.kernels.base import WeightPrecision
from remora.kernels.batch import StepBatch
from remora.kernels.reference.decoder import TorchDecoder
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError


def make_decoder(
    model: transformers.PreTrainedModel, *, weights: WeightPrecision = "fp32", kv: str = "fp32", block_tokens: int = 16
) -> TorchDecoder:
    shape, tensors = shape_and_weights(model, weights=weights)
    return TorchDecoder(shape, tensors, make_geometry(shape, kv, block_tokens), num_threads=1)


def geometry_of(decoder: TorchDecoder) -> KVGeometry:
    return decoder._layouts.own.geometry


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("ends", [[77], [1, 2, 33, 64, 77], list(range(1, 78))], ids=["whole", "chunks", "one by one"])
def test_logits_equal_transformers_however_the_prompt_is_cut(family: str, ends: list[int]) -> None:
    model = make_model(family)
    decoder = make_decoder(model)
    tokens = np.random.default_rng(1).integers(0, 199, 77).astype(np.int32)
    memory = Memory(geometry_of(decoder), 9)
    logits = run(decoder, memory, tokens, np.array([7, 2, 8, 0, 5], np.int32), ends)
    assert np.abs(logits - expected_logits(model, tokens)).max() < 1e-3


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model = make_model("llama")
    decoder = make_decoder(model)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 199, length).astype(np.int32) for length in (1, 40, 16, 17)]
    tables = [np.array(t, np.int32) for t in ([3], [9, 1, 4], [6], [0, 8])]
    memory = Memory(geometry_of(decoder), 10)
    batch = StepBatch(max_tokens=80, max_sequences=4, max_blocks=4)
    rows = [batch.add(p, first_position=0, blocks=t) for p, t in zip(prompts, tables, strict=True)]
    logits = decoder.forward(batch, memory)
    for prompt, row in zip(prompts, rows, strict=True):
        assert np.abs(logits[row][0] - expected_logits(model, prompt)[-1]).max() < 1e-3


@pytest.mark.parametrize(("weights", "bound"), [("bf16", 0.25), ("int8", 0.6)])
def test_rounded_weights_stay_near_the_exact_model(weights: WeightPrecision, bound: float) -> None:
    model = make_model("llama")
    tokens = np.random.default_rng(3).integers(0, 199, 50).astype(np.int32)
    decoder = make_decoder(model, weights=weights, kv="bf16")
    logits = run(decoder, Memory(geometry_of(decoder), 4), tokens, np.arange(4, dtype=np.int32), [50])
    expected = expected_logits(model, tokens)
    error = np.abs(logits - expected).max() / expected.std()
    assert 0 < error < bound


def test_what_cannot_be_run_is_refused_before_anything_is_written() -> None:
    model = make_model("llama")
    decoder = make_decoder(model)
    memory = Memory(geometry_of(decoder), 4)
    before = memory.data.copy()
    batch = StepBatch(max_tokens=32, max_sequences=2, max_blocks=2)
    for tokens, blocks, message in [([5] * 17, [1, 4], "block 4"), ([5], [-1], "block -1"), ([199], [0], "vocabulary")]:
        batch.clear()
        batch.add([1], first_position=0, blocks=[0])
        batch.add(tokens, first_position=0, blocks=blocks)
        with pytest.raises(KernelError, match=message):
            decoder.forward(batch, memory)
    other = make_decoder(model, block_tokens=32)
    with pytest.raises(KernelError, match="geometry"):
        other.forward(batch, memory)
    assert (memory.data == before).all()
