"""Sequences of random K, V and queries in an arena, and steps over them: what the tests of CUDA attention share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch
from remora.kernels.cuda.attention import paged_attention, upload_step
from remora.kernels.cuda.attention_plan import AttentionPlan, plan_attention
from remora.kernels.cuda.device import Device
from remora.kernels.cuda.place import block_major, layer_major
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reference import attention as reference
from remora.kernels.reference.kv_view import KVView
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision

LAYER, _NUM_LAYERS = 1, 2
Float32 = NDArray[np.float32]
#: Of (sequence, first position, end position).
Rows = list[tuple[int, int, int]]


@dataclass
class Result:
    out_TQD: Float32
    lse_TQ: Float32

    def bits(self) -> bytes:
        return self.out_TQD.tobytes() + self.lse_TQ.tobytes()

    def rows(self, first: int, end: int) -> Result:
        return Result(self.out_TQD[first:end], self.lse_TQ[first:end])


class World:
    """Sequences of random K, V and queries in an arena with shuffled blocks, full of NaN elsewhere.

    Sequences after the first share the first `num_common_blocks` of it. `precision` is "bf16", or "int8/int4" for K/V.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        precision: str = "bf16",
        values: str = "fp32",
        head_dim: int = 64,
        num_kv_heads: int = 2,
        group: int = 3,
        block_tokens: int = 32,
        num_common_blocks: int = 0,
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
        self.layout = BlockLayout(KVGeometry(groups=(layers,), block_tokens=block_tokens))
        self.values, self.group, self.scale = values, group, head_dim**-0.5
        rng = np.random.default_rng(11)
        columns = [-(-length // block_tokens) for length in lengths]
        order = rng.permutation(sum(columns) + 3).astype(np.int32)
        self.num_blocks = len(order)
        self.data = np.full(len(order) * self.layout.block_bytes, 0xFF, np.uint8)
        self.view = KVView(self.layout, self.data)
        self.lengths, self.blocks, self.queries = lengths, [], []
        for index, (length, count) in enumerate(zip(lengths, columns, strict=True)):
            blocks, order = order[:count].copy(), order[count:]
            common = min(count, num_common_blocks) if index else 0
            blocks[:common] = self.blocks[0][:common] if index else blocks[:common]
            self.blocks.append(blocks)
            shape = (length, num_kv_heads * group, head_dim)
            queries = rng.standard_normal(shape, dtype=np.float32) * query_scale
            if values == "bf16":
                queries = torch.from_numpy(queries).to(torch.bfloat16).to(torch.float32).numpy()
            self.queries.append(queries)
            kv = torch.from_numpy(rng.standard_normal((length, 2, num_kv_heads, head_dim), dtype=np.float32))
            position = np.arange(common * block_tokens, length)
            block, slot = (
                torch.from_numpy(x).long() for x in (blocks[position // block_tokens], position % block_tokens)
            )
            for side in (K_SIDE, V_SIDE):
                self.view.write(side, LAYER, block, slot, kv[common * block_tokens :, side])

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

    def plan(self, rows: Rows, *, num_processors: int = 1, group_prefixes: bool = True) -> AttentionPlan:
        return plan_attention(
            self.batch(rows),
            group=self.group,
            num_kv_heads=self.layout.num_kv_heads,
            block_tokens=self.layout.block_tokens,
            num_processors=num_processors,
            group_prefixes=group_prefixes,
        )

    def run(
        self, device: Device, rows: Rows, plan: AttentionPlan | None = None, *, by_layer: bool = False
    ) -> list[Result]:
        """Attention of a step; one result per entry. Without a plan, tiles are whole and nothing is split."""
        batch = self.batch(rows)
        q = np.concatenate([self.queries[index][first:end] for index, first, end in rows])
        q_bits = q if self.values == "fp32" else torch.from_numpy(q).to(torch.bfloat16).view(torch.uint16).numpy()
        data, place = self.data, block_major(self.layout, LAYER)
        if by_layer:
            place = layer_major(self.layout, LAYER, self.num_blocks)
            whole = self.data.reshape(self.num_blocks, _NUM_LAYERS, -1)
            data = np.ascontiguousarray(whole.transpose(1, 0, 2)).reshape(-1)
        kv = device.upload(data)
        out, lse = device.empty(q.shape, q_bits.dtype), device.empty(q.shape[:2], np.float32)
        step = upload_step(device, batch, plan or self.plan(rows, num_processors=0), self.layout, kv, q.shape[1])
        paged_attention(
            device,
            step,
            q_TQD=device.upload(q_bits),
            out_TQD=out,
            lse_TQ=lse,
            data=kv,
            layout=self.layout,
            place=place,
            scale=self.scale,
        )
        out_host, lse_host = device.download(out), device.download(lse)
        if self.values == "bf16":
            out_host = torch.from_numpy(out_host).view(torch.bfloat16).to(torch.float32).numpy()
        starts = batch.query_start_S
        return [Result(out_host, lse_host).rows(starts[i], starts[i + 1]) for i in range(len(rows))]

    def expected(self, index: int, first: int, end: int) -> tuple[Float32, Float32]:
        out, lse = reference.paged_attention(
            self.view,
            layer=LAYER,
            q_TQD=torch.from_numpy(self.queries[index][first:end]),
            blocks=torch.from_numpy(self.blocks[index]).long(),
            context_len=end,
            scale=self.scale,
        )
        return out.numpy(), lse.numpy()


def check(world: World, rows: Rows, results: list[Result]) -> None:
    for (index, first, end), result in zip(rows, results, strict=True):
        out, lse = world.expected(index, first, end)
        bound = 2e-5 if world.values == "fp32" else 2.0**-8 * np.abs(out).max()
        assert np.abs(result.out_TQD - out).max() < bound
        assert np.abs(result.lse_TQ - lse).max() < 2e-5
