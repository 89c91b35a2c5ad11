"""The GPU benchmark on the emulated device: that it runs and counts, not how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from module_file import load_module

from remora.kernels.cuda.host.emulator import HostDevice
from remora.kernels.cuda.host.runtime import EmulatedRuntime

_FOLDER = Path(__file__).parents[2] / "bench"


def test_the_gpu_benchmark_measures_every_operation(device: HostDevice) -> None:
    bench_gpu = load_module(_FOLDER / "bench_gpu.py")
    sizes = bench_gpu.Sizes(
        num_sequences=2,
        context_len=64,
        prefill_rows=5,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        block_tokens=16,
    )

    def timer(call: Callable[[], None]) -> float:
        call()
        return 1e-3

    ceilings = bench_gpu.Ceilings(bytes_per_s=1e9, flop_per_s=1e9)
    data = device.upload(np.full(bench_gpu.num_arena_bytes(sizes), 0x3F, np.uint8))
    bench = bench_gpu.GpuBench(device, timer, sizes, ceilings, data)
    lines = [*bench.decode(), *bench.prefill(), *bench.blocks()]
    assert [line.split(",")[0].split()[0] for line in lines] == [
        "decode",
        "decode",
        "block-major",
        "decode",
        "decode",
        "decode",
        "prefill",
        "copy_blocks",
        "checksum",
        "zero_blocks",
    ]
    # Two layers share the millisecond; each reads 2 sequences x 64 positions x 2 heads x 64 dims x 2 bytes, K and V.
    assert f"({2 * 64 * 2 * 64 * 2 * 2 / 0.5e-3 / 1e9:6.1%})" in lines[0]
    # The same in int8 and a scale, V in int4 and a scale.
    assert lines[4].startswith("decode, int8 K, int4 V")
    assert f"({2 * 64 * 2 * (66 + 34) / 0.5e-3 / 1e9:6.1%})" in lines[4]
    assert not data.reshape(bench.num_blocks, -1)[: bench.num_blocks // 2].any()


def test_the_gpu_benchmark_runs_the_decoder_launched_and_captured(runtime: EmulatedRuntime) -> None:
    gpu_decoder = load_module(_FOLDER / "gpu_decoder.py")
    shape = replace(
        gpu_decoder.ONE_B, num_layers=1, hidden_size=96, intermediate_size=96, num_attention_heads=3, num_kv_heads=1,
        vocab_size=50,
    )  # fmt: skip
    before = runtime.num_replays
    name, launched, captured, prompt = gpu_decoder.decoder_lines(
        runtime, shape=shape, num_sequences=2, context_len=20, prefill_rows=18, block_tokens=16, num_runs=1
    )
    assert name == "cuda-bf16 on emulated, attention remora.cuda"
    assert launched.startswith("decoder, 2 rows at 20, launched: ")
    assert captured.startswith("decoder, 2 rows at 20, captured: ")
    assert prompt.startswith("decoder, prompt of 18: ")
    assert runtime.num_replays == before + 3
