"""The GPU benchmark on the emulated device: that it runs and counts, not how fast."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from remora.kernels.cuda.host.emulator import HostDevice

_PATH = Path(__file__).parents[2] / "bench" / "bench_gpu.py"


def test_the_gpu_benchmark_measures_every_operation(device: HostDevice) -> None:
    spec = importlib.util.spec_from_file_location("remora_bench_gpu", _PATH)
    assert spec is not None
    assert spec.loader is not None
    bench_gpu = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench_gpu
    spec.loader.exec_module(bench_gpu)
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
