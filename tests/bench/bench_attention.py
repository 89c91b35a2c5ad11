"""Time of paged attention alone: `python tests/bench/bench_attention.py [--level avx2] [--threads 2] [--jsonl]`.

Beside each time stand the bytes of K and V read per second and the arithmetic per second, and the share of what the
same run measured for plain memory reads; figures of docs/benchmarks.md come from here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch
from remora.kernels.layout import BlockLayout
from remora.kernels.native.attention import paged_attention
from remora.kernels.native.library import LEVELS, load_library
from remora.namespaces.geometry import KVGeometry, LayerGroup

_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences that all have `before` tokens of context and `new` rows in the step."""

    name: str
    num_sequences: int
    before: int
    new: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    precision: str = "bf16"


_SMOL = Case(
    name="prefill 1 x 512",
    num_sequences=1,
    before=0,
    new=512,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
)
_ONE_B = replace(_SMOL, num_layers=8, num_heads=32, num_kv_heads=8)
CASES = [
    replace(_SMOL, name="decode 32 x 256", num_sequences=32, before=255, new=1),
    replace(_SMOL, name="decode 32 x 256, fp32", num_sequences=32, before=255, new=1, precision="fp32"),
    replace(_SMOL, name="decode 1 x 2048", before=2047, new=1),
    _SMOL,
    replace(_SMOL, name="prefill 1 x 512, fp32", precision="fp32"),
    replace(_SMOL, name="next turn 32 on 2048", before=2048, new=32),
    replace(_ONE_B, name="1B shape, 8 layers, decode 16 x 1024", num_sequences=16, before=1023, new=1),
]


@dataclass
class _Memory:
    geometry: KVGeometry
    data: NDArray[np.uint8]


def read_bandwidth_bytes_s(num_threads: int) -> float:
    """Best rate of summing memory that does not fit any cache."""
    parts = [np.ones(1 << 27, np.uint8).view(np.uint64) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as threads:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            list(threads.map(np.sum, parts))
            best = min(best, time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / best


def run(case: Case, *, level: str, num_threads: int, bandwidth: float) -> dict[str, object]:
    """The case's figures: the median of 7 runs of all layers, starting the threads included."""
    group = LayerGroup(
        num_layers=case.num_layers,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        k_precision=case.precision,  # type: ignore[arg-type]
        v_precision=case.precision,  # type: ignore[arg-type]
    )
    geometry = KVGeometry(groups=(group,), block_tokens=_BLOCK_TOKENS)
    context = case.before + case.new
    columns = -(-context // _BLOCK_TOKENS)
    rng = np.random.default_rng(0)
    order = rng.permutation(case.num_sequences * columns).astype(np.int32)
    memory = _Memory(geometry, np.zeros(len(order) * geometry.block_bytes, np.uint8))
    values = rng.standard_normal(1 << 16, dtype=np.float32)
    layout = BlockLayout(geometry)
    view = layout.numpy_view(memory.data)
    bits = values if case.precision == "fp32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    view[...] = np.resize(bits, view.shape[1:])
    batch = StepBatch(max_tokens=case.num_sequences * case.new, max_sequences=case.num_sequences, max_blocks=columns)
    for index in range(case.num_sequences):
        blocks = order[index * columns : (index + 1) * columns]
        batch.add([0] * case.new, first_position=case.before, blocks=blocks)
    q = rng.standard_normal((batch.num_tokens, case.num_heads, case.head_dim), dtype=np.float32)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        paged_attention(
            batch,
            memory,
            q,
            layer=0,
            num_layers=case.num_layers,
            scale=case.head_dim**-0.5,
            level=level,
            num_threads=num_threads,
        )
        times.append(time.perf_counter() - start)
    seconds = float(np.median(times[1:]))
    kv_bytes = case.num_sequences * context * group.token_bytes()
    pairs = case.num_sequences * sum(case.before + row + 1 for row in range(case.new))
    flop = 4 * pairs * case.num_heads * case.head_dim * case.num_layers
    return {
        **asdict(case),
        "level": level,
        "num_threads": num_threads,
        "ms": seconds * 1e3,
        "kv_gbytes_s": kv_bytes / seconds / 1e9,
        "share_of_read_bandwidth": kv_bytes / seconds / bandwidth,
        "gflop_s": flop / seconds / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", choices=LEVELS, help="instruction-set level; the best by default")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--jsonl", action="store_true", help="one JSON object a line instead of the table")
    options = parser.parse_args()
    level = LEVELS[load_library().level_number(options.level)]
    bandwidth = read_bandwidth_bytes_s(options.threads)
    if not options.jsonl:
        print(f"level {level}, {options.threads} threads, memory reads {bandwidth / 1e9:.1f} GB/s")
    for case in CASES:
        figures = run(case, level=level, num_threads=options.threads, bandwidth=bandwidth)
        if options.jsonl:
            print(json.dumps(figures), flush=True)
        else:
            print(
                f"{case.name:38} {figures['ms']:8.2f} ms  {figures['kv_gbytes_s']:6.1f} GB/s of K and V "
                f"({figures['share_of_read_bandwidth']:4.0%} of reads)  {figures['gflop_s']:6.1f} GFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
