"""Copies slots of blocks to other blocks, K rotated to other positions: what an edit of a sequence needs.

Shapes: N blocks, L layers, H kv heads, B tokens a block, D head_dim, M tokens that move.
"""

from __future__ import annotations

import torch

from remora.kernels.layout import K_SIDE, V_SIDE
from remora.kernels.reference.rope import rope_tables, rotate

#: Tokens that are rotated at once: a few MiB in fp32 for common models.
_MAX_TOKENS = 128


def move_slots(
    kv_NL2HBD: torch.Tensor,
    *,
    source_blocks_M: torch.Tensor,
    source_slots_M: torch.Tensor,
    target_blocks_M: torch.Tensor,
    target_slots_M: torch.Tensor,
    delta: int,
    inv_freq: torch.Tensor,
) -> None:
    """Copies K and V of each token in all layers; K moves by `delta` positions (negative: back).

    Rotated in fp32 and rounded once to the arena's dtype. No source may be a target.
    """
    cos, sin = rope_tables(torch.tensor([delta]), inv_freq)
    for start in range(0, len(source_blocks_M), _MAX_TOKENS):
        part = slice(start, start + _MAX_TOKENS)
        source, slot = source_blocks_M[part], source_slots_M[part]
        target, target_slot = target_blocks_M[part], target_slots_M[part]
        kv_NL2HBD[target, :, V_SIDE, :, target_slot] = kv_NL2HBD[source, :, V_SIDE, :, slot]
        k_MLHD = kv_NL2HBD[source, :, K_SIDE, :, slot]
        if delta:
            rows = k_MLHD.to(torch.float32).reshape(1, -1, k_MLHD.shape[-1])
            k_MLHD = rotate(rows, cos, sin).to(k_MLHD.dtype).reshape(k_MLHD.shape)
        kv_NL2HBD[target, :, K_SIDE, :, target_slot] = k_MLHD
