"""`make bench-check`: whether the decoder has become slower than tests/bench/figures.json says.

A figure is the share of the machine's own rates that a step reaches: the least time in which its weights are read and
its operations done, at the memory and GEMM rate that are measured right before it, over the time it took. So it holds
on a machine of the same kind that is faster or slower today; each kind of processor has figures of its own. Fails when
a share is more than 10 % lower than the kept one. On a quiet machine `--renew` keeps today's shares for this processor:
do that, and commit the file, when a change is meant to move them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from bench_native import BLOCK_TOKENS, Memory, layer_parameters, make_shape, random_weights, time_steps

from remora.kernels.base import DecoderShape, WeightPrecision
from remora.kernels.batch import StepBatch
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.native.library import LEVELS, load_library
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.cli.calibration import Calibration, calibrate

FIGURES = Path(__file__).with_name("figures.json")
ALLOWED_LOSS = 0.10
PRECISIONS: tuple[WeightPrecision, ...] = ("bf16", "int8", "int4")
#: Bytes of a weight, scales and minimums included.
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0 + 2 / 32, "int4": 0.5 + 4 / 32}
DECODE_ROWS = (1, 16)
PREFILL_TOKENS = 512
CONTEXT = 256
REPEATS = 40


def fill(batch: StepBatch, vocab_size: int, num_rows: int) -> None:
    """A decode step of so many sequences, or the prefill of one prompt."""
    draw = np.random.default_rng(0)
    batch.clear()
    if num_rows == PREFILL_TOKENS:
        tokens = draw.integers(0, vocab_size, PREFILL_TOKENS).astype(np.int32)
        batch.add(tokens, first_position=0, blocks=list(range(PREFILL_TOKENS // BLOCK_TOKENS)))
        return
    columns = CONTEXT // BLOCK_TOKENS + 1
    for row in range(num_rows):
        token = draw.integers(0, vocab_size, 1).astype(np.int32)
        batch.add(token, first_position=CONTEXT, blocks=np.arange(columns * row, columns * (row + 1), dtype=np.int32))


def floor_s(shape: DecoderShape, num_rows: int, rates: Calibration) -> float:
    head = shape.vocab_size * shape.hidden_size
    layers = layer_parameters(shape)
    logit_rows = 1 if num_rows == PREFILL_TOKENS else num_rows
    return rates.floor_s((layers + head) * WEIGHT_BYTES[shape.weights], 2 * (layers * num_rows + head * logit_rows))


def measure(num_threads: int) -> dict[str, float]:
    shares = {}
    for precision in PRECISIONS:
        shape = make_shape("135m", precision)
        group = LayerGroup(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        geometry = KVGeometry(groups=(group,), block_tokens=BLOCK_TOKENS)
        memory = Memory(geometry, (CONTEXT // BLOCK_TOKENS + 1) * max(DECODE_ROWS) + 16)
        batch = StepBatch(max_tokens=PREFILL_TOKENS, max_sequences=max(DECODE_ROWS), max_blocks=16)
        decoder = NativeDecoder(shape, random_weights(shape), geometry, num_threads)
        for num_rows in (*DECODE_ROWS, PREFILL_TOKENS):
            fill(batch, shape.vocab_size, num_rows)
            rates = calibrate()
            repeats = REPEATS // 8 if num_rows == PREFILL_TOKENS else REPEATS
            taken_s = min(time_steps(decoder, batch, memory, repeats, time.perf_counter)) / 1e3
            name = "prefill 512" if num_rows == PREFILL_TOKENS else f"decode {num_rows}"
            shares[f"{precision} {name}"] = round(floor_s(shape, num_rows, rates) / taken_s, 3)
    return shares


def processor(num_threads: int) -> str:
    """What figures belong to: the processor's kind, the instructions that are used, and how many threads."""
    level = LEVELS[load_library().functions.remora_default_level()]
    facts = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line][:4]
    return f"{' '.join(facts[1:4])}, {level}, {num_threads} threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--renew", action="store_true", help="keep what is measured now")
    options = parser.parse_args()
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    key = processor(options.threads)
    expected: dict[str, float] = kept.get(key, {})
    if not expected and not options.renew:
        print(f"{FIGURES.name} has no figures for {key}; on a quiet machine, make some with --renew")
        return 2
    shares = measure(options.threads)
    print(f"{key}: share of the floor")
    lost = []
    for name, share in shares.items():
        before = expected.get(name)
        change = "" if before is None else f"  was {before:.3f}  {100 * (share / before - 1):+.1f} %"
        print(f"  {name:<18} {share:.3f}{change}")
        if before is not None and share < before * (1 - ALLOWED_LOSS):
            lost.append(name)
    if options.renew:
        FIGURES.write_text(json.dumps({**kept, key: shares}, indent=2) + "\n")
    elif lost:
        print(f"slower by more than {100 * ALLOWED_LOSS:.0f} %: {', '.join(lost)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
