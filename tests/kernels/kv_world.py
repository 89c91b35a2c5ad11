"""Sequences of random K, V and queries in an arena: what the tests of attention share, native and CUDA."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reference import attention as reference
from remora.kernels.reference.kv_view import KVView
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision

LAYER, NUM_LAYERS = 1, 2
Float32 = NDArray[np.float32]
#: Of (sequence, first position, end position).
Rows = list[tuple[int, int, int]]


class KVWorld:
    """Sequences of random K, V and queries in an arena with shuffled blocks, full of NaN elsewhere: stale bytes.

    Sequences after the first share the first `num_common_blocks` of it. `precision` is "bf16", or "int8/int4" for K/V.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        precision: str = "bf16",
        head_dim: int = 64,
        num_kv_heads: int = 2,
        group: int = 3,
        block_tokens: int = 32,
        num_common_blocks: int = 0,
        query_scale: float = 2.0,
    ) -> None:
        k_precision, _, v_precision = precision.partition("/")
        layers = LayerGroup(
            num_layers=NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            k_precision=cast("Precision", k_precision),
            v_precision=cast("Precision", v_precision or k_precision),
        )
        self.geometry = KVGeometry(groups=(layers,), block_tokens=block_tokens)
        self.layout = BlockLayout(self.geometry)
        self.group, self.scale, self.lengths = group, head_dim**-0.5, lengths
        rng = np.random.default_rng(11)
        columns = [-(-length // block_tokens) for length in lengths]
        order = rng.permutation(sum(columns) + 3).astype(np.int32)
        self.num_blocks = len(order)
        self.data = np.full(self.num_blocks * self.layout.block_bytes, 0xFF, np.uint8)
        self.view = KVView(self.layout, self.data)
        self.blocks: list[NDArray[np.int32]] = []
        #: Of every position; a test takes the last ones as the rows of its step.
        self.queries: list[Float32] = []
        for index, (length, count) in enumerate(zip(lengths, columns, strict=True)):
            blocks, order = order[:count].copy(), order[count:]
            common = min(count, num_common_blocks) if index else 0
            if common:
                blocks[:common] = self.blocks[0][:common]
            self.blocks.append(blocks)
            shape = (length, num_kv_heads * group, head_dim)
            self.queries.append(rng.standard_normal(shape, dtype=np.float32) * query_scale)
            kv = torch.from_numpy(rng.standard_normal((length, 2, num_kv_heads, head_dim), dtype=np.float32))
            own = min(common * block_tokens, length)  # the first position that is not in a common block
            position = torch.arange(own, length)
            block = torch.from_numpy(blocks).long()[position // block_tokens]
            for side in (K_SIDE, V_SIDE):
                self.view.write(side, LAYER, block, position % block_tokens, kv[own:, side])

    @property
    def kv(self) -> torch.Tensor:
        """The arena as kv_NL2HBD, where it is not quantised."""
        return self.layout.torch_view(self.data)

    def batch(self, rows: Rows) -> StepBatch:
        batch = StepBatch(
            max_tokens=sum(end - first for _, first, end in rows),
            max_sequences=len(rows),
            max_blocks=max(map(len, self.blocks)),
        )
        for index, first, end in rows:
            used = -(-end // self.layout.block_tokens)
            batch.add([0] * (end - first), first_position=first, blocks=self.blocks[index][:used])
        return batch

    def queries_of(self, rows: Rows) -> Float32:
        return np.concatenate([self.queries[index][first:end] for index, first, end in rows])

    def expected(self, index: int, first: int, end: int, *, rounded_queries: bool = False) -> tuple[Float32, Float32]:
        """Outputs and log-sum-exp of the reference."""
        q = torch.from_numpy(self.queries[index][first:end])
        out, lse = reference.paged_attention(
            self.view,
            layer=LAYER,
            q_TQD=q.to(torch.bfloat16) if rounded_queries else q,
            blocks=torch.from_numpy(self.blocks[index]).long(),
            context_len=end,
            scale=self.scale,
        )
        return out.numpy(), lse.numpy()
