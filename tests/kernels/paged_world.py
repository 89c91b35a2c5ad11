"""Steps of the native attention over a KVWorld."""

from __future__ import annotations

import numpy as np
from kv_world import LAYER, KVWorld, Rows

from remora.kernels.native.attention import AttentionResult, paged_attention


class World(KVWorld):
    """The world itself is the memory that the kernels are given."""

    def run(self, rows: Rows, *, level: str, num_threads: int = 2) -> list[AttentionResult]:
        """Attention of a step; one result per entry."""
        batch = self.batch(rows)
        result = paged_attention(
            *(batch, self, self.queries_of(rows)), layer=LAYER, scale=self.scale, level=level, num_threads=num_threads
        )
        starts = batch.query_start_S
        return [
            AttentionResult(
                out_TQD=result.out_TQD[starts[i] : starts[i + 1]], lse_TQ=result.lse_TQ[starts[i] : starts[i + 1]]
            )
            for i in range(len(rows))
        ]


def same_bits(a: AttentionResult, b: AttentionResult) -> bool:
    return a.out_TQD.tobytes() == b.out_TQD.tobytes() and a.lse_TQ.tobytes() == b.lse_TQ.tobytes()


def check_against_reference(world: World, rows: Rows, level: str) -> None:
    # These levels multiply bf16 by bf16: queries and weights are rounded to 8 bits.
    rounds = level in ("avx512bf16", "amx") and world.layout.precisions == ("bf16", "bf16")
    # These multiply bytes where K and V are both integers: queries are rounded to 16 bits, weights to 15.
    multiplies_bytes = level in ("avx512", "avx512bf16", "amx") and not {"fp32", "bf16"} & {*world.layout.precisions}
    bound = 2.0**-7 if rounds else 2.0**-10 if multiplies_bytes else 2e-5
    for (index, first, end), result in zip(rows, world.run(rows, level=level), strict=True):
        out, lse = world.expected(index, first, end, rounded_queries=rounds)
        assert np.abs(result.out_TQD - out).max() < bound
        assert np.abs(result.lse_TQ - lse).max() < bound
