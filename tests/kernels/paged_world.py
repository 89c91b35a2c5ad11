"""An arena with sequences of random K and V, and steps over it: what the tests of attention share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch
from remora.kernels.layout import BlockLayout
from remora.kernels.native.attention import AttentionResult, paged_attention
from remora.kernels.reference import attention as reference
from remora.kernels.reference.kv_view import KVView
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision

LAYER, _NUM_LAYERS = 1, 2
Float32 = NDArray[np.float32]


@dataclass
class Arena:
    """A private arena full of NaN, as stale bytes may be."""

    geometry: KVGeometry
    data: NDArray[np.uint8]

    @property
    def kv(self) -> torch.Tensor:
        """K and V alike, in fp32 or bf16."""
        return BlockLayout(self.geometry).torch_view(self.data)

    @property
    def view(self) -> KVView:
        return KVView(BlockLayout(self.geometry), self.data)


@dataclass
class Sequence:
    blocks: NDArray[np.int32]
    context_len: int
    #: Queries of every position; a test takes the last ones as the rows of its step.
    q_CQD: Float32


class World:
    """Sequences of random K, V and queries in an arena with shuffled blocks."""

    def __init__(
        self,
        lengths: list[int],
        *,
        precision: str = "bf16",
        head_dim: int = 64,
        num_kv_heads: int = 2,
        group: int = 3,
        block_tokens: int = 32,
        query_scale: float = 2.0,
    ) -> None:
        k_precision, _, v_precision = precision.partition("/")
        layers = LayerGroup(
            num_layers=_NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            k_precision=cast("Precision", k_precision),
            v_precision=cast("Precision", v_precision or k_precision),
        )
        geometry = KVGeometry(groups=(layers,), block_tokens=block_tokens)
        rng = np.random.default_rng(11)
        columns = [-(-length // block_tokens) for length in lengths]
        order = rng.permutation(sum(columns) + 3).astype(np.int32)
        self.arena = Arena(geometry, np.full(len(order) * geometry.block_bytes, 0xFF, np.uint8))
        self.scale = head_dim**-0.5
        self.sequences = []
        for length, count in zip(lengths, columns, strict=True):
            blocks, order = order[:count], order[count:]
            shape = (length, num_kv_heads * group, head_dim)
            queries = rng.standard_normal(shape, dtype=np.float32) * query_scale
            self.sequences.append(Sequence(blocks, length, queries))
            kv = torch.from_numpy(rng.standard_normal((length, 2, num_kv_heads, head_dim), dtype=np.float32))
            position = torch.arange(length)
            block_C = torch.from_numpy(blocks).long()[position // block_tokens]
            for side in (0, 1):
                self.arena.view.write(side, LAYER, block_C, position % block_tokens, kv[:, side])

    def run(self, rows: list[tuple[int, int, int]], *, level: str, num_threads: int = 2) -> list[AttentionResult]:
        """Attention of a step of (sequence, first position, end position); one result per entry."""
        num_tokens = sum(end - first for _, first, end in rows)
        num_columns = max(len(sequence.blocks) for sequence in self.sequences)
        batch = StepBatch(max_tokens=num_tokens, max_sequences=len(rows), max_blocks=num_columns)
        for index, first, end in rows:
            blocks = self.sequences[index].blocks
            used = -(-end // self.arena.geometry.block_tokens)
            batch.add([0] * (end - first), first_position=first, blocks=blocks[:used])
        q = np.concatenate([self.sequences[index].q_CQD[first:end] for index, first, end in rows])
        result = paged_attention(
            batch, self.arena, q, layer=LAYER, scale=self.scale, level=level, num_threads=num_threads
        )
        starts = batch.query_start_S
        return [
            AttentionResult(
                out_TQD=result.out_TQD[starts[i] : starts[i + 1]], lse_TQ=result.lse_TQ[starts[i] : starts[i + 1]]
            )
            for i in range(len(rows))
        ]

    def expected(self, index: int, first: int, end: int, *, rounded_queries: bool) -> tuple[Float32, Float32]:
        sequence = self.sequences[index]
        q = torch.from_numpy(sequence.q_CQD[first:end])
        if rounded_queries:
            q = q.to(torch.bfloat16)
        out, lse = reference.paged_attention(
            self.arena.view,
            layer=LAYER,
            q_TQD=q,
            blocks=torch.from_numpy(sequence.blocks).long(),
            context_len=end,
            scale=self.scale,
        )
        return out.numpy(), lse.numpy()


def same_bits(a: AttentionResult, b: AttentionResult) -> bool:
    return a.out_TQD.tobytes() == b.out_TQD.tobytes() and a.lse_TQ.tobytes() == b.lse_TQ.tobytes()


def check_against_reference(world: World, rows: list[tuple[int, int, int]], level: str) -> None:
    # The AMX path multiplies bf16 by bf16: queries and weights are rounded to 8 bits.
    rounds = level == "amx" and BlockLayout(world.arena.geometry).precisions == ("bf16", "bf16")
    bound = 2.0**-7 if rounds else 2e-5
    for (index, first, end), result in zip(rows, world.run(rows, level=level), strict=True):
        out, lse = world.expected(index, first, end, rounded_queries=rounds)
        assert np.abs(result.out_TQD - out).max() < bound
        assert np.abs(result.lse_TQ - lse).max() < bound
