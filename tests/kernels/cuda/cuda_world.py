"""Steps of the CUDA attention over a KVWorld, by emulation or on a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kv_world import LAYER, NUM_LAYERS, Float32, KVWorld, Rows

from remora.kernels.cuda.attention import paged_attention, upload_step
from remora.kernels.cuda.attention_plan import AttentionPlan, plan_attention
from remora.kernels.cuda.device import Device
from remora.kernels.cuda.place import block_major, layer_major


@dataclass
class Result:
    out_TQD: Float32
    lse_TQ: Float32

    def bits(self) -> bytes:
        return self.out_TQD.tobytes() + self.lse_TQ.tobytes()

    def rows(self, first: int, end: int) -> Result:
        return Result(self.out_TQD[first:end], self.lse_TQ[first:end])


class World(KVWorld):
    """`values`: "fp32" or "bf16", of queries and outputs. The other options are those of KVWorld."""

    def __init__(self, lengths: list[int], *, values: str = "fp32", **options: Any) -> None:
        super().__init__(lengths, **options)
        self.values = values
        if values == "bf16":
            self.queries = [torch.from_numpy(q).to(torch.bfloat16).to(torch.float32).numpy() for q in self.queries]

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
        q = self.queries_of(rows)
        q_bits = q if self.values == "fp32" else torch.from_numpy(q).to(torch.bfloat16).view(torch.uint16).numpy()
        data, place = self.data, block_major(self.layout, LAYER)
        if by_layer:
            place = layer_major(self.layout, LAYER, self.num_blocks)
            whole = self.data.reshape(self.num_blocks, NUM_LAYERS, -1)
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


def check(world: World, rows: Rows, results: list[Result]) -> None:
    for (index, first, end), result in zip(rows, results, strict=True):
        out, lse = world.expected(index, first, end)
        bound = 2e-5 if world.values == "fp32" else 2.0**-8 * np.abs(out).max()
        assert np.abs(result.out_TQD - out).max() < bound
        assert np.abs(result.lse_TQ - lse).max() < 2e-5
