"""NativeDecoder against the torch reference (which its own tests hold against transformers), at every level."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decoder_world import LLAMA, Memory, assert_bad_steps_are_refused, make_geometry, make_weights, random_tokens, run

from remora.kernels.base import DecoderShape, WeightPrecision
from remora.kernels.batch import StepBatch
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.native.library import LEVEL_VARIABLE, LIBRARY_VARIABLE, StaleLibrary
from remora.kernels.reference.decoder import TorchDecoder
from remora.kernels.registry import make_decoder
from remora.platform.base.errors import KernelError

SHAPES = {
    "llama, groups of 3": LLAMA,
    "llama, one group each, 80": replace(LLAMA, num_attention_heads=2, num_kv_heads=2, head_dim=80),
    "qwen2, groups of 4, 128": replace(LLAMA, num_attention_heads=8, num_kv_heads=2, head_dim=128, qkv_bias=True),
    "qwen3, groups of 8, 96": replace(LLAMA, num_attention_heads=8, head_dim=96, qk_norm=True),
    "every bias": replace(
        LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True, attention_scale=0.11, rope_attention_factor=1.2
    ),
}


@pytest.fixture
def own_build(native_library: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library as users have it, with the best level of this machine."""
    monkeypatch.setenv(LIBRARY_VARIABLE, str(native_library(False)))


def make_native(
    shape: DecoderShape, level: str | None = None, *, kv: str = "fp32", num_threads: int = 2, tied: bool = False
) -> NativeDecoder:
    return NativeDecoder(shape, make_weights(shape, tied=tied), make_geometry(shape, kv), num_threads, level=level)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kv", ["fp32", "bf16"])
def test_fp32_logits_equal_the_reference_of_every_family(level: str, name: str, kv: str) -> None:
    shape = SHAPES[name]
    geometry, tokens, blocks = make_geometry(shape, kv), random_tokens(shape, 70), np.array([4, 0, 6, 2, 1], np.int32)
    expected = run(TorchDecoder(shape, make_weights(shape), geometry, 1), Memory(geometry, 7), tokens, blocks, [70])
    logits = run(make_native(shape, level, kv=kv), Memory(geometry, 7), tokens, blocks, [70])
    # A value of K or V that lies between two of bf16 may be rounded either way.
    assert np.abs(logits - expected).max() < (1e-4 if kv == "fp32" else 2e-2)


@pytest.mark.parametrize("kv", ["int8", "int4", "int8/int4", "int5/int4", "bf16/int8"])
def test_logits_over_quantised_kv_equal_those_of_the_reference(level: str, kv: str) -> None:
    geometry, tokens, blocks = make_geometry(LLAMA, kv), random_tokens(LLAMA, 70), np.array([4, 0, 6, 2, 1], np.int32)
    expected = run(TorchDecoder(LLAMA, make_weights(LLAMA), geometry, 1), Memory(geometry, 7), tokens, blocks, [70])
    logits = run(make_native(LLAMA, level, kv=kv), Memory(geometry, 7), tokens, blocks, [70])
    # A value between two codes may be rounded either way: a step of int4 shows, one of int8 hardly does.
    assert np.abs(logits - expected).max() < (0.1 if "int4" in kv else 0.02) * expected.std()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_one_decoder_computes_each_step_in_the_precision_of_its_memory(own_build: None, backend: str) -> None:
    def make(kv: str) -> NativeDecoder | TorchDecoder:
        if backend == "native":
            return make_native(LLAMA, kv=kv)
        return TorchDecoder(LLAMA, make_weights(LLAMA), make_geometry(LLAMA, kv), 1)

    tokens, blocks, one = random_tokens(LLAMA, 20), np.array([2, 0], np.int32), make("bf16")
    for kv in ("int8", "bf16", "int8/int4", "int8"):
        geometry = make_geometry(LLAMA, kv)
        one.check_geometry(geometry)
        expected = run(make(kv), Memory(geometry, 3), tokens, blocks, [20])
        assert (run(one, Memory(geometry, 3), tokens, blocks, [20]) == expected).all(), kv
    with pytest.raises(KernelError, match="geometry"):
        one.check_geometry(make_geometry(LLAMA, "int8", block_tokens=32))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_a_sequence_whose_kv_is_not_finite_is_named_and_spoils_no_other(own_build: None, backend: str, kv: str) -> None:
    weights = make_weights(LLAMA)
    weights["embed"][7] = float("inf")
    geometry = make_geometry(LLAMA, kv)
    decoder: NativeDecoder | TorchDecoder = (
        NativeDecoder(LLAMA, weights, geometry, 2) if backend == "native" else TorchDecoder(LLAMA, weights, geometry, 1)
    )
    good, bad = random_tokens(LLAMA, 20), random_tokens(LLAMA, 20, seed=1)
    good[good == 7], bad[bad == 7] = 8, 8
    batch = StepBatch(max_tokens=60, max_sequences=3, max_blocks=2)
    outputs = []
    for spoilt in (False, True):
        bad[11] = 7 if spoilt else 8
        batch.clear()
        rows = [batch.add(good, first_position=0, blocks=[0, 1]), batch.add(bad, first_position=0, blocks=[2, 3])]
        rows.append(batch.add(good, first_position=0, blocks=[4, 5]))
        logits = decoder.forward(batch, Memory(geometry, 6)).copy()
        assert batch.not_finite_S.tolist() == [0, int(spoilt), 0]
        outputs.append([logits[row] for row in rows])
    clean, dirty = outputs
    assert (clean[0] == dirty[0]).all()
    assert (clean[2] == dirty[2]).all()
    assert not np.isfinite(dirty[1]).any()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("weights", "bound"), [("bf16", 0.03), ("int8", 0.03), ("int4", 0.03)])
def test_rounded_weights_stay_near_their_reference(
    level: str, weights: WeightPrecision, bound: float, tied: bool
) -> None:
    shape = replace(LLAMA, weights=weights)
    geometry, tokens, blocks = make_geometry(shape), random_tokens(shape, 70), np.arange(5, dtype=np.int32)
    reference = TorchDecoder(shape, make_weights(shape, tied=tied), geometry, 1)
    expected = run(reference, Memory(geometry, 5), tokens, blocks, [70])
    logits = run(make_native(shape, level, tied=tied), Memory(geometry, 5), tokens, blocks, [70])
    if weights in ("int8", "int4") and level.startswith("avx512"):
        bound = 0.08  # activations of 8 bits; the reference's have 16
    assert np.abs(logits - expected).max() < bound * expected.std()


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut_and_whoever_runs_beside_it(
    level: str, weights: WeightPrecision
) -> None:
    shape = replace(LLAMA, weights=weights)
    tokens, blocks = random_tokens(shape, 70), np.array([4, 0, 6, 2, 1], np.int32)
    decoder = make_native(shape, level, kv="bf16")
    memory = Memory(make_geometry(shape, "bf16"), 40)
    whole = run(decoder, memory, tokens, blocks, [70])
    kept = memory.data.copy()
    one_thread = make_native(shape, level, kv="bf16", num_threads=1)
    for other, ends in [(one_thread, [70]), (decoder, [1, 2, 33, 64, 70]), (one_thread, list(range(1, 71)))]:
        memory.data[:] = 0xFF
        assert (run(other, memory, tokens, blocks, ends) == whole).all()
        assert (memory.data == kept).all()

    batch = StepBatch(max_tokens=200, max_sequences=9, max_blocks=5)
    rng = np.random.default_rng(3)
    free = iter(rng.permutation(np.arange(7, 40)).astype(np.int32))
    for length in (1, 17, 30, 2):
        own = [next(free) for _ in range(-(-length // 16))]
        batch.add(random_tokens(shape, length, seed=length), first_position=0, blocks=own)
    rows = batch.add(tokens[64:], first_position=64, blocks=blocks, logits="all")
    batch.add(random_tokens(shape, 48), first_position=0, blocks=[next(free) for _ in range(3)])
    assert (decoder.forward(batch, memory)[rows] == whole[64:]).all()


def test_what_cannot_be_run_is_refused_before_anything_is_written(own_build: None) -> None:
    decoder = make_native(LLAMA)
    memory = Memory(make_geometry(LLAMA), 4)
    batch = StepBatch(max_tokens=32, max_sequences=2, max_blocks=2)
    assert_bad_steps_are_refused(decoder, memory, Memory(make_geometry(LLAMA, block_tokens=32), 4), batch)
    assert (memory.data == 0xFF).all()


def test_weights_and_shapes_that_do_not_fit_are_refused_by_name(own_build: None) -> None:
    weights, geometry = make_weights(LLAMA), make_geometry(LLAMA)

    def make(shape: DecoderShape = LLAMA, **changed: torch.Tensor | None) -> NativeDecoder:
        given = {name: tensor for name, tensor in {**weights, **changed}.items() if tensor is not None}
        return NativeDecoder(shape, given, geometry, 1)

    with pytest.raises(KernelError, match=r"layers\.1\.down is missing"):
        make(**{"layers.1.down": None})
    with pytest.raises(KernelError, match=r"layers\.0\.qkv has 320 x 91 values, not 320 x 90"):
        make(**{"layers.0.qkv": torch.zeros(320, 91)})
    with pytest.raises(KernelError, match="shape has not"):
        make(**{"layers.0.q_norm": torch.zeros(64)})
    with pytest.raises(KernelError, match="wte"):
        make(wte=torch.zeros(4))
    with pytest.raises(KernelError, match="no such layer"):
        make(**{"layers.2.o": torch.zeros(90, 192)})
    with pytest.raises(KernelError, match="does not fit"):
        make(replace(LLAMA, num_layers=3))
    odd = replace(LLAMA, head_dim=40)
    with pytest.raises(KernelError, match="head_dim 40"):
        NativeDecoder(odd, make_weights(odd), make_geometry(odd), 1)
    with pytest.raises(KernelError, match="num_threads"):
        NativeDecoder(LLAMA, weights, geometry, 0)


def test_the_environment_forces_a_level(own_build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "portable")
    decoder = make_native(LLAMA)
    assert (decoder.level, decoder.name, decoder.batch_invariant) == ("portable", "native-portable-fp32", True)
    monkeypatch.setenv(LEVEL_VARIABLE, "sse9")
    with pytest.raises(KernelError, match=r"REMORA_NATIVE_ISA is sse9; this machine has .*portable"):
        make_native(LLAMA)


def test_the_registry_takes_native_kernels_or_warns(
    own_build: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights, geometry = make_weights(LLAMA), make_geometry(LLAMA)
    assert isinstance(make_decoder(LLAMA, weights, geometry, num_threads=1), NativeDecoder)
    assert isinstance(make_decoder(LLAMA, weights, geometry, num_threads=1, backend="reference"), TorchDecoder)
    assert not caplog.records
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nowhere/library.so")
    assert isinstance(make_decoder(LLAMA, weights, geometry, num_threads=1), TorchDecoder)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "remora.kernels.native.build" in caplog.text
    with pytest.raises(KernelError, match="nowhere"):
        make_decoder(LLAMA, weights, geometry, num_threads=1, backend="native")


def test_a_library_of_another_version_is_refused(own_build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import _ctypes  # a shared library without our functions

    monkeypatch.setenv(LIBRARY_VARIABLE, _ctypes.__file__)
    with pytest.raises(StaleLibrary, match=r"remora_.*rebuild them with `python -m remora.kernels.native.build`"):
        make_decoder(LLAMA, make_weights(LLAMA), make_geometry(LLAMA), num_threads=1)


def test_decoders_run_side_by_side_and_leave_no_thread(own_build: None) -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    tokens, blocks = random_tokens(LLAMA, 70), np.arange(5, dtype=np.int32)
    before = num_threads()
    expected = run(make_native(LLAMA), Memory(make_geometry(LLAMA), 5), tokens, blocks, [70])
    wrong: list[int] = []

    def work(index: int) -> None:
        decoder = make_native(LLAMA, num_threads=2 + index % 2)
        for _ in range(5):
            if (run(decoder, Memory(make_geometry(LLAMA), 5), tokens, blocks, [30, 70]) != expected).any():
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    deadline_s = time.monotonic() + 10  # a thread that was joined may still be on its way out
    while num_threads() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert num_threads() == before
