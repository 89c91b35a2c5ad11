"""How fast this machine is right now: what figures of one run are held against, since absolute ones move with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

_READ_BYTES = 512 * 1024 * 1024
_GEMM_SIDE = 1536
_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Of all cores of this process together, the best of a few rounds: libraries' own loops, none of Remora's."""

    memory_bytes_per_s: float
    gemm_flops_per_s: float

    def floor_s(self, num_bytes: float, num_flops: float) -> float:
        """The least time in which so many bytes are read and so many operations done, at these rates."""
        return max(num_bytes / self.memory_bytes_per_s, num_flops / self.gemm_flops_per_s)


def calibrate() -> Calibration:
    """Takes about two seconds. Matrices are bf16 or fp32, whichever torch multiplies faster here."""
    import torch

    # Far larger than any cache; 64-bit words, so that adding them up is bound by reading.
    words = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    read_s = _best_s(lambda: words.sum())
    gemm_s = []
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.full((_GEMM_SIDE, _GEMM_SIDE), 0.01, dtype=dtype)
        gemm_s.append(_best_s(partial(torch.matmul, left, left)))
    return Calibration(
        memory_bytes_per_s=_READ_BYTES / read_s,
        gemm_flops_per_s=2 * _GEMM_SIDE**3 / min(gemm_s),
    )


def _best_s(work: Callable[[], object]) -> float:
    work()
    times_s = []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)
