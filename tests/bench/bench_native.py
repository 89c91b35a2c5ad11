"""Milliseconds a step of the native decoder: `python tests/bench/bench_native.py [--threads 2] [--level avx2]`.

SmolLM2-135M's shape with random weights. A decode step of M sequences stands at position 256; prefill is one prompt
of 512; then a turn of 32 tokens behind 2,048, and a decode step of 16 sequences with 1,024 tokens in common and 64 of
their own. Prints the median, the lowest, and the rate of reading weights or of multiplying that it amounts to. On a
busy machine `--threads 1 --cpu-time` says more: CPU time of the process, not what its neighbours take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.base import DecoderShape, WeightPrecision
from remora.kernels.batch import StepBatch
from remora.kernels.native.decoder import NativeDecoder
from remora.namespaces.geometry import KVGeometry, LayerGroup

SHAPES = {
    "135m": {
        "num_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "heads": 9,
        "kv_heads": 3,
        "vocab": 49152,
    },
    "1b": {
        "num_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "heads": 32,
        "kv_heads": 8,
        "vocab": 49152,
    },
}
BLOCK_TOKENS = 32


class Memory:
    """A private arena, touched once so that no page fault falls into a step."""

    def __init__(self, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.data: NDArray[np.uint8] = np.ones(num_blocks * geometry.block_bytes, np.uint8)
        self.data[:] = 0


def make_shape(name: str, weights: WeightPrecision) -> DecoderShape:
    size = SHAPES[name]
    return DecoderShape(
        num_layers=size["num_layers"],
        hidden_size=size["hidden_size"],
        intermediate_size=size["intermediate_size"],
        num_attention_heads=size["heads"],
        num_kv_heads=size["kv_heads"],
        head_dim=64,
        vocab_size=size["vocab"],
        rms_norm_eps=1e-5,
        weights=weights,
    )


def random_weights(shape: DecoderShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).to(torch.bfloat16)

    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    weights = {
        "embed": matrix(shape.vocab_size, hidden),
        "final_norm": torch.ones(hidden),
        "rope_inv_freq": 10000.0 ** -(torch.arange(0, dim, 2) / dim),
    }
    for index in range(shape.num_layers):
        prefix = f"layers.{index}."
        weights[prefix + "input_norm"] = weights[prefix + "post_norm"] = torch.ones(hidden)
        weights[prefix + "qkv"] = matrix((shape.num_attention_heads + 2 * shape.num_kv_heads) * dim, hidden)
        weights[prefix + "o"] = matrix(hidden, shape.num_attention_heads * dim)
        weights[prefix + "gate_up"] = matrix(2 * inner, hidden)
        weights[prefix + "down"] = matrix(hidden, inner)
    return weights


def layer_parameters(shape: DecoderShape) -> int:
    q = shape.num_attention_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    return shape.num_layers * shape.hidden_size * (2 * q + 2 * kv + 3 * shape.intermediate_size)


def time_steps(
    decoder: NativeDecoder, batch: StepBatch, memory: Memory, repeats: int, clock: Callable[[], float]
) -> list[float]:
    decoder.forward(batch, memory)
    times_ms = []
    for _ in range(repeats):
        start = clock()
        decoder.forward(batch, memory)
        times_ms.append((clock() - start) * 1e3)
    return times_ms


def report(label: str, times_ms: list[float], rate: str) -> None:
    print(
        f"{label:<28} median {statistics.median(times_ms):8.2f} ms  lowest {min(times_ms):8.2f} ms  {rate}", flush=True
    )


def bench(decoder: NativeDecoder, shape: DecoderShape, repeats: int, clock: Callable[[], float]) -> None:
    group = LayerGroup(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    geometry = KVGeometry(groups=(group,), block_tokens=BLOCK_TOKENS)
    memory = Memory(geometry, 32 * 9 + 16)
    batch = StepBatch(max_tokens=512, max_sequences=32, max_blocks=65)
    rng = np.random.default_rng(0)
    head = shape.vocab_size * shape.hidden_size
    for num_rows in (1, 8, 16, 32):
        batch.clear()
        for row in range(num_rows):
            tokens = rng.integers(0, shape.vocab_size, 1).astype(np.int32)
            batch.add(tokens, first_position=256, blocks=np.arange(9 * row, 9 * row + 9, dtype=np.int32))
        times = time_steps(decoder, batch, memory, repeats, clock)
        rate = f"{(decoder.weight_bytes) / min(times) / 1e6:6.1f} GB/s of weights"
        report(f"{decoder.name} decode M={num_rows}", times, rate)
    batch.clear()
    batch.add(rng.integers(0, shape.vocab_size, 512).astype(np.int32), first_position=0, blocks=list(range(16)))
    times = time_steps(decoder, batch, memory, max(3, repeats // 4), clock)
    rate = f"{2 * (layer_parameters(shape) * 512 + head) / min(times) / 1e9:6.3f} TFLOP/s of linear layers"
    report(f"{decoder.name} prefill 512", times, rate)
    batch.clear()
    batch.add(rng.integers(0, shape.vocab_size, 32).astype(np.int32), first_position=2048, blocks=list(range(65)))
    report(f"{decoder.name} turn 32 on 2048", time_steps(decoder, batch, memory, repeats, clock), "")
    batch.clear()
    for row in range(16):
        tokens = rng.integers(0, shape.vocab_size, 1).astype(np.int32)
        own = range(32 + 3 * row, 35 + 3 * row)
        batch.add(tokens, first_position=1088, blocks=[*range(32), *own])
    report(f"{decoder.name} 16 x (1024 + 64)", time_steps(decoder, batch, memory, repeats, clock), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", default=None)
    parser.add_argument("--model", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--weights", nargs="+", choices=["bf16", "int8", "int4", "fp32"], default=["bf16", "int8"])
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    for precision in options.weights:
        shape = make_shape(options.model, precision)
        group = LayerGroup(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        geometry = KVGeometry(groups=(group,), block_tokens=BLOCK_TOKENS)
        start = time.perf_counter()
        decoder = NativeDecoder(shape, random_weights(shape), geometry, options.threads, level=options.level)
        print(f"{decoder.name}: made in {time.perf_counter() - start:.2f} s, {decoder.weight_bytes / 1e6:.0f} MB")
        bench(decoder, shape, options.repeats, time.process_time if options.cpu_time else time.perf_counter)


if __name__ == "__main__":
    main()
