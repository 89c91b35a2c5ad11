"""Whole steps of the decoder on a card with random weights: a part of bench_gpu.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from remora.kernels.base import DecoderShape
from remora.kernels.batch import StepBatch
from remora.kernels.cuda.decoder import CudaDecoder
from remora.kernels.cuda.runtime import Runtime
from remora.kernels.reencoder import HostMemory
from remora.kernels.weight_sizes import weight_sizes
from remora.namespaces.geometry import KVGeometry, LayerGroup

#: As Llama 3.2 1B.
ONE_B = DecoderShape(
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    rms_norm_eps=1e-5,
)


def decoder_lines(
    runtime: Runtime,
    *,
    shape: DecoderShape = ONE_B,
    num_sequences: int = 64,
    context_len: int = 2048,
    prefill_rows: int = 2048,
    block_tokens: int = 64,
    num_runs: int = 10,
) -> list[str]:
    """Decode launched and captured, and one prompt. Seconds are those of the caller: all copies are in them."""
    group = LayerGroup(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    geometry = KVGeometry(groups=(group,), block_tokens=block_tokens)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(size, generator=generator, dtype=torch.bfloat16) * size[-1] ** -0.5
        for name, size in weight_sizes(shape).items()
    }
    decoder = CudaDecoder(shape, weights, geometry, runtime)
    columns = -(-max(context_len, prefill_rows) // block_tokens)
    table_SB = np.random.default_rng(1).permutation(num_sequences * columns).astype(np.int32).reshape(-1, columns)
    with runtime.turn():
        data: Any = runtime.upload(np.zeros(table_SB.size * geometry.block_bytes, np.uint8))
    memory = HostMemory(data, geometry)

    def decode(last_logits: str) -> float:
        """A step with a row that wants no logits is not captured."""
        batch = StepBatch(max_tokens=num_sequences, max_sequences=num_sequences, max_blocks=columns)
        for row in range(num_sequences):
            logits = last_logits if row == num_sequences - 1 else "last"
            batch.add([row], first_position=context_len - 1, blocks=table_SB[row], logits=logits)
        return _median_s(lambda: decoder.forward(batch, memory), num_runs)

    prompt = StepBatch(max_tokens=prefill_rows, max_sequences=1, max_blocks=columns)
    prompt.add([1] * prefill_rows, first_position=0, blocks=table_SB[0])
    launched_s, captured_s = decode("none"), decode("last")
    prefill_s = _median_s(lambda: decoder.forward(prompt, memory), num_runs)
    step = f"decoder, {num_sequences} rows at {context_len}"
    return [
        decoder.name,
        f"{step}, launched: {launched_s * 1e3:.2f} ms, {num_sequences / launched_s:.0f} tokens/s",
        f"{step}, captured: {captured_s * 1e3:.2f} ms, {num_sequences / captured_s:.0f} tokens/s",
        f"decoder, prompt of {prefill_rows}: {prefill_s * 1e3:.2f} ms, {prefill_rows / prefill_s:.0f} tokens/s",
    ]


def _median_s(call: Callable[[], object], num_runs: int) -> float:
    times = []
    for run in range(num_runs + 3):  # compiles, captures, replays
        started_s = time.perf_counter()
        call()
        if run >= 3:
            times.append(time.perf_counter() - started_s)
    return float(np.median(times))
