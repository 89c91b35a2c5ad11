"""CudaDecoder by emulation; tests/gpu runs the same on a card. The oracle is transformers, and our torch reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decoder_world import (
    LLAMA,
    Float32,
    Int32,
    Memory,
    assert_bad_steps_are_refused,
    make_geometry,
    make_weights,
    random_tokens,
    run,
)
from hf_world import expected_logits, make_model, shape_and_weights
from pipeline_world import NUM_BLOCKS, make_native, pipeline

from remora.kernels.base import DecoderShape, Weights, check_decoder_health
from remora.kernels.batch import StepBatch
from remora.kernels.cuda import decoder as decoder_module
from remora.kernels.cuda.decoder import CudaDecoder
from remora.kernels.cuda.runtime import Runtime
from remora.kernels.reference.decoder import TorchDecoder
from remora.kernels.stages import StagePart, StageWeights
from remora.namespaces.geometry import KVGeometry
from remora.namespaces.sequence_commands import Move
from remora.platform.base.errors import KernelError

TABLE = np.array([4, 0, 6, 2, 1], np.int32)


class DeviceMemory:
    """A private arena full of NaN, on the runtime's device."""

    def __init__(self, runtime: Runtime, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        with runtime.turn():
            self.data: Any = runtime.upload(np.full(num_blocks * geometry.block_bytes, 0xFF, np.uint8))
        self._runtime = runtime

    def bytes(self) -> bytes:
        with self._runtime.turn():
            return self._runtime.download(self.data).tobytes()


def make_cuda(runtime: Runtime, shape: DecoderShape = LLAMA, *, kv: str = "fp32", tied: bool = False) -> CudaDecoder:
    return CudaDecoder(shape, make_weights(shape, tied=tied), make_geometry(shape, kv), runtime, attention="cuda")


@contextmanager
def products_row_by_row() -> Iterator[None]:
    """Linear layers whose rows do not depend on each other, which a library does not promise."""

    def linear(x_TI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.stack([torch.mv(weight, row) for row in x_TI])
        return out if bias is None else out + bias

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_module, "linear", linear)
        yield


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3"])
def test_logits_equal_transformers_however_the_prompt_is_cut(runtime: Runtime, family: str) -> None:
    model = make_model(family)
    shape, weights = shape_and_weights(model)
    decoder = CudaDecoder(shape, weights, make_geometry(shape), runtime, attention="cuda")
    tokens = random_tokens(shape, 40, seed=1)
    memory = DeviceMemory(runtime, make_geometry(shape), 7)
    logits = run(decoder, memory, tokens, TABLE, [1, 2, 33, 40])
    assert np.abs(logits - expected_logits(model, tokens)).max() < 1e-3


def decode_greedily(decoder: CudaDecoder, memory: DeviceMemory, prompts: list[Int32], count: int) -> list[list[int]]:
    """All prompts side by side, one token a step; each has five blocks of its own."""
    batch = StepBatch(max_tokens=200, max_sequences=len(prompts), max_blocks=5)
    tables = np.arange(5 * len(prompts), dtype=np.int32).reshape(-1, 5)
    said: list[list[int]] = [[] for _ in prompts]
    for step in range(count):
        batch.clear()
        for prompt, own, table in zip(prompts, said, tables, strict=True):
            rows = [*prompt, *own] if step == 0 else own[-1:]
            batch.add(rows, first_position=len(prompt) + len(own) - len(rows), blocks=table)
        for own, row in zip(said, decoder.forward(batch, memory), strict=True):
            own.append(int(row.argmax()))
    return said


def test_captured_steps_say_what_transformers_says(runtime: Runtime) -> None:
    """Three sequences in graphs of four rows: the first step of a kind is launched, the second captured."""
    model = make_model("llama")
    shape, weights = shape_and_weights(model)
    decoder = CudaDecoder(shape, weights, make_geometry(shape), runtime, attention="cuda")
    memory = DeviceMemory(runtime, make_geometry(shape), 16)
    before = memory.bytes()[15 * memory.geometry.block_bytes :]
    prompts = [random_tokens(shape, length, seed=length) for length in (3, 17, 30)]
    for prompt, said in zip(prompts, decode_greedily(decoder, memory, prompts, 5), strict=True):
        logits = expected_logits(model, np.array([*prompt, *said], np.int32))
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == said
    assert len(decoder._graphs._graphs) == 1
    # Rows that only fill a graph up store nothing.
    assert memory.bytes()[15 * memory.geometry.block_bytes :] == before


@pytest.mark.parametrize("kv", ["bf16", "int8/int4", "int5/int4"])
def test_every_precision_is_near_the_reference(runtime: Runtime, kv: str) -> None:
    tokens, geometry = random_tokens(LLAMA, 40), make_geometry(LLAMA, kv)
    expected = run(TorchDecoder(LLAMA, make_weights(LLAMA), geometry, 1), Memory(geometry, 7), tokens, TABLE, [40])
    memory = DeviceMemory(runtime, geometry, 7)
    decoder = make_cuda(runtime)
    decoder.check_geometry(geometry)
    logits = run(decoder, memory, tokens, TABLE, [25, 40])
    # A value that lies between two codes may be rounded either way.
    assert np.abs(logits - expected).max() < (0.02 if kv == "bf16" else 0.15) * expected.std()


def test_bf16_weights_stay_near_the_exact_model(runtime: Runtime) -> None:
    shape = replace(LLAMA, weights="bf16")
    tokens, geometry = random_tokens(shape, 40), make_geometry(shape, "bf16")
    expected = run(TorchDecoder(LLAMA, make_weights(LLAMA), geometry, 1), Memory(geometry, 7), tokens, TABLE, [40])
    logits = run(make_cuda(runtime, shape, kv="bf16"), DeviceMemory(runtime, geometry, 7), tokens, TABLE, [40])
    assert 0 < np.abs(logits - expected).max() < 0.1 * expected.std()


def test_every_bias_norm_and_scale_is_used(runtime: Runtime) -> None:
    shape = replace(
        LLAMA,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=True,
        attention_scale=0.11,
        rope_attention_factor=1.2,
    )
    tokens, geometry = random_tokens(shape, 20), make_geometry(shape)
    expected = run(TorchDecoder(shape, make_weights(shape), geometry, 1), Memory(geometry, 7), tokens, TABLE, [20])
    logits = run(make_cuda(runtime, shape), DeviceMemory(runtime, geometry, 7), tokens, TABLE, [20])
    assert np.abs(logits - expected).max() < 1e-4


def test_a_row_has_the_same_bits_however_its_prompt_is_cut_and_whoever_runs_beside_it(runtime: Runtime) -> None:
    """Where linear layers do not spoil it: norms, rope, storage and attention, launched and captured."""
    shape = replace(LLAMA, weights="bf16")
    tokens, geometry = random_tokens(shape, 40), make_geometry(shape, "bf16")
    decoder, memory = make_cuda(runtime, shape, kv="bf16"), DeviceMemory(runtime, geometry, 20)
    with products_row_by_row():
        whole = run(decoder, memory, tokens, TABLE, [40])
        kept = memory.bytes()
        # The last four are steps of one row: launched, captured, replayed twice.
        other = DeviceMemory(runtime, geometry, 20)
        assert (run(decoder, other, tokens, TABLE, [17, 33, 36, 37, 38, 39, 40]) == whole).all()
        assert other.bytes() == kept
        batch = StepBatch(max_tokens=80, max_sequences=4, max_blocks=5)
        batch.add(random_tokens(shape, 17, seed=3), first_position=0, blocks=[7, 8])
        rows = batch.add(tokens[33:], first_position=33, blocks=TABLE, logits="all")
        batch.add(random_tokens(shape, 3, seed=4), first_position=0, blocks=[9], logits="none")
        assert (decoder.forward(batch, memory)[rows] == whole[33:]).all()


def test_stages_one_after_the_other_give_the_whole_model_s_bits(runtime: Runtime) -> None:
    """A prompt, and then the same token thrice: launched, captured, replayed."""
    weights, tokens = make_weights(LLAMA, tied=True), random_tokens(LLAMA, 9)
    own = [StagePart(split=(1, 1), stage=stage) for stage in range(2)]
    geometries = [part.geometry_of(make_geometry(LLAMA)) for part in own]
    stages = [
        CudaDecoder(part.shape_of(LLAMA), StageWeights(weights, part), geometry, runtime, attention="cuda")
        for part, geometry in zip(own, geometries, strict=True)
    ]
    memories = [DeviceMemory(runtime, geometry, 2) for geometry in geometries]
    whole, memory = make_cuda(runtime, tied=True), DeviceMemory(runtime, make_geometry(LLAMA), 2)
    batch = StepBatch(max_tokens=9, max_sequences=1, max_blocks=1)
    for first in (0, 8, 8, 8):
        batch.clear()
        batch.add(tokens[first:], first_position=first, blocks=[1], logits="all")
        hidden: Float32 | None = None
        for stage, own_memory in zip(stages, memories, strict=True):
            hidden = stage.forward_stage(batch, own_memory, hidden).copy()
        assert hidden is not None
        assert (hidden == whole.forward(batch, memory)).all()


@pytest.mark.parametrize("on_device", [0, 1])
def test_a_stage_on_a_device_is_beside_one_in_host_memory(runtime: Runtime, on_device: int) -> None:
    tokens, whole, split = random_tokens(LLAMA, 60), make_geometry(LLAMA, "bf16"), (1, LLAMA.num_layers - 1)
    parts = [StagePart(split=split, stage=stage).geometry_of(whole) for stage in range(2)]
    expected = run(TorchDecoder(LLAMA, make_weights(LLAMA), whole, 1), Memory(whole, 7), tokens, TABLE, [60])

    def make_on_device(shape: DecoderShape, weights: Weights, geometry: KVGeometry) -> CudaDecoder:
        return CudaDecoder(shape, weights, geometry, runtime, attention="cuda")

    makers, memories = [make_native] * 2, [Memory(part, NUM_BLOCKS) for part in parts]
    makers[on_device], memories[on_device] = make_on_device, DeviceMemory(runtime, parts[on_device], NUM_BLOCKS)
    batch = StepBatch(max_tokens=60, max_sequences=1, max_blocks=len(TABLE))
    with pipeline(LLAMA, split, makers=makers, memories=memories) as world:
        for first, end in [(0, 25), (25, 40), (40, 41), (41, 60)]:
            batch.clear()
            batch.add(tokens[first:end], first_position=first, blocks=TABLE)
            (logits,) = world.decoder.forward(batch, memories[0])
            assert np.abs(logits - expected[end - 1]).max() < 0.02 * expected.std()


def test_sequences_whose_kv_is_not_finite_are_marked(runtime: Runtime) -> None:
    weights = make_weights(LLAMA)
    weights["embed"][7] = float("nan")
    decoder = CudaDecoder(LLAMA, weights, make_geometry(LLAMA), runtime, attention="cuda")
    memory = DeviceMemory(runtime, make_geometry(LLAMA), 3)
    batch = StepBatch(max_tokens=9, max_sequences=3, max_blocks=1)
    for _ in range(3):  # launched, captured, replayed
        batch.clear()
        for block, token in enumerate((5, 7, 6)):
            batch.add([token], first_position=0, blocks=[block])
        logits = decoder.forward(batch, memory)
        assert batch.not_finite_S.tolist() == [0, 1, 0]
        assert np.isfinite(logits[[0, 2]]).all()


def test_what_cannot_be_run_is_refused_before_anything_is_written(runtime: Runtime) -> None:
    decoder = make_cuda(runtime)
    memory = DeviceMemory(runtime, make_geometry(LLAMA), 4)
    batch = StepBatch(max_tokens=32, max_sequences=2, max_blocks=2)
    other_memory = DeviceMemory(runtime, make_geometry(LLAMA, block_tokens=32), 4)
    # Launched, captured, replayed.
    assert_bad_steps_are_refused(decoder, memory, other_memory, batch, times=3)
    with pytest.raises(KernelError, match="hidden states"):
        decoder.forward_stage(batch, memory, np.zeros((1, 90), np.float32))
    assert set(memory.bytes()) == {0xFF}


def test_steps_that_cannot_be_captured_are_launched(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(runtime, "capture", fail)
    decoder, memory = make_cuda(runtime), DeviceMemory(runtime, make_geometry(LLAMA), 1)
    logits = [run(decoder, memory, random_tokens(LLAMA, 1), np.zeros(1, np.int32), [1]) for _ in range(4)]
    assert all((each == logits[0]).all() for each in logits)
    assert caplog.text.count("they cannot be captured: operation not permitted") == 1


def test_a_device_that_is_lost_fails_its_steps_and_the_health_of_the_decoder(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, memory = make_cuda(runtime), DeviceMemory(runtime, make_geometry(LLAMA), 1)

    def fail(array: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "download", fail)
        with pytest.raises(KernelError, match=r"a step of 1 tokens failed on .*: CUDA error: out of memory"):
            run(decoder, memory, random_tokens(LLAMA, 1), np.zeros(1, np.int32), [1])
        check_decoder_health(decoder)
        patch.setattr(runtime, "failure", lambda: "an illegal memory access was encountered")
        with pytest.raises(KernelError, match="failed"):
            run(decoder, memory, random_tokens(LLAMA, 1), np.zeros(1, np.int32), [1])
    with pytest.raises(KernelError, match="is lost to this process: an illegal memory access"):
        check_decoder_health(decoder)


def test_weights_and_shapes_that_do_not_fit_are_refused_by_name(runtime: Runtime) -> None:
    weights = make_weights(LLAMA)

    def make(shape: DecoderShape = LLAMA, **changed: torch.Tensor | None) -> CudaDecoder:
        given = {name: tensor for name, tensor in {**weights, **changed}.items() if tensor is not None}
        return CudaDecoder(shape, given, make_geometry(LLAMA), runtime, attention="cuda")

    with pytest.raises(KernelError, match=r"layers\.1\.down is missing"):
        make(**{"layers.1.down": None})
    with pytest.raises(KernelError, match=r"layers\.0\.qkv has shape \(320, 91\), not \(320, 90\)"):
        make(**{"layers.0.qkv": torch.zeros(320, 91)})
    with pytest.raises(KernelError, match="wte"):
        make(wte=torch.zeros(4))
    with pytest.raises(KernelError, match="does not fit"):
        make(replace(LLAMA, num_layers=3))
    with pytest.raises(KernelError, match="weights in int8 are not multiplied on GPUs yet"):
        make(replace(LLAMA, weights="int8"))
    odd = replace(LLAMA, head_dim=40)
    with pytest.raises(KernelError, match="head_dim 40"):
        CudaDecoder(odd, make_weights(odd), make_geometry(odd), runtime)


def test_blocks_are_moved_and_written_on_the_device(runtime: Runtime) -> None:
    geometry, tokens = make_geometry(LLAMA), random_tokens(LLAMA, 20)
    decoder, memory = make_cuda(runtime), DeviceMemory(runtime, geometry, 7)
    whole = run(decoder, memory, tokens, TABLE, [20])
    mover = decoder.mover(memory, make_weights(LLAMA)["rope_inv_freq"].numpy())
    size = geometry.block_bytes
    taken = np.frombuffer(memory.bytes()[4 * size : 5 * size], np.uint8).copy()
    mover.copy_block(0, 5)
    mover.write_block(3, taken)
    moved = np.array([3, 5], np.int32)
    batch = StepBatch(max_tokens=1, max_sequences=1, max_blocks=2)
    batch.add(tokens[19:], first_position=19, blocks=moved)
    assert np.abs(decoder.forward(batch, memory) - whole[19]).max() < 1e-5
    # Eight tokens back and forth again.
    mover.move([Move(3, 0, 6, 8, 8, 8)])
    mover.move([Move(6, 8, 2, 0, 8, -8)])
    batch.clear()
    batch.add(tokens[8:9], first_position=8, blocks=[2])
    assert np.abs(decoder.forward(batch, memory) - whole[8]).max() < 1e-4
    for call in (lambda: mover.copy_block(7, 0), lambda: mover.write_block(-1, taken)):
        with pytest.raises(KernelError, match="outside the memory"):
            call()
    with pytest.raises(KernelError, match="block 7"):
        mover.move([Move(7, 0, 0, 0, 1, 1)])
    assert not decoder.mover(memory, None).can_move
