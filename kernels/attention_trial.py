"""A small step that an attention back-end must get right before it is used: ragged rows, shuffled blocks, GQA."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from remora.kernels.attention_base import AttentionInputs, AttentionNeed, PagedAttention
from remora.kernels.batch import StepBatch
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reference.attention import paged_attention
from remora.kernels.reference.kv_view import KVView
from remora.namespaces.geometry import KVGeometry

_SEED = 7


def largest_difference(backend: PagedAttention, need: AttentionNeed, torch_device: str) -> float:
    """Largest absolute difference of outputs and LSE from the torch reference, relative to the largest output.

    One layer of the need's shape: sequences that decode, extend, end a block and begin one. NaN when a result is NaN.
    """
    group = need.layout.geometry.groups[0]
    geometry = KVGeometry(groups=(group,), block_tokens=need.layout.block_tokens)
    layout = BlockLayout(geometry)
    tokens = layout.block_tokens
    spans = [(0, 1), (tokens - 1, tokens), (tokens, tokens + 3), (5, 2 * tokens + 1)]
    generator = torch.Generator().manual_seed(_SEED)
    num_columns = 3
    blocks = np.random.default_rng(_SEED).permutation(num_columns * len(spans)).astype(np.int32)
    data = np.zeros(len(blocks) * layout.block_bytes, np.uint8)
    kv = KVView(layout, data)
    layer = layout.num_layers - 1
    for side, slot in itertools.product((K_SIDE, V_SIDE), range(tokens)):
        stored = torch.randn(len(blocks), layout.num_kv_heads, layout.head_dim, generator=generator)
        kv.write(side, layer, torch.arange(len(blocks)), torch.full((len(blocks),), slot), stored)
    batch = StepBatch(
        max_tokens=sum(end - first for first, end in spans), max_sequences=len(spans), max_blocks=num_columns
    )
    for index, (first, end) in enumerate(spans):
        own = blocks[index * num_columns : (index + 1) * num_columns]
        batch.add([0] * (end - first), first_position=first, blocks=own[: -(-end // tokens)])
    dtype = torch.float32 if need.values == "fp32" else torch.bfloat16
    q = torch.randn(batch.num_tokens, need.num_heads, layout.head_dim, generator=generator).to(dtype)

    arena = torch.from_numpy(data).to(torch_device)
    inputs = AttentionInputs(step=backend.begin(batch, arena), layer=layer, q_TQD=q.to(torch_device), data=arena)
    out, lse = (tensor.float().cpu() for tensor in backend.attend(inputs))
    worst = 0.0
    for row, (_, end) in enumerate(spans):
        rows = slice(int(batch.query_start_S[row]), int(batch.query_start_S[row + 1]))
        expected_out, expected_lse = paged_attention(
            kv,
            layer=layer,
            q_TQD=q[rows],
            blocks=torch.from_numpy(batch.block_table_SB[row]).long(),
            context_len=end,
            scale=need.scale,
        )
        differences = ((out[rows] - expected_out).abs().max() / expected_out.abs().max()).item()
        worst = float(np.maximum(worst, max(differences, (lse[rows] - expected_lse).abs().max().item())))
    return worst
