"""Copies slots of blocks to other blocks, K rotated to other positions: what an edit of a sequence needs.

Shapes: N blocks, L layers, H kv heads, B tokens a block, D head_dim.
"""

from __future__ import annotations

import torch

from remora.kernels.layout import K_SIDE
from remora.kernels.reference.rope import rope_tables, rotate


def move_slots(
    kv_NL2HBD: torch.Tensor,
    *,
    source_block: int,
    source_slot: int,
    target_block: int,
    target_slot: int,
    num_tokens: int,
    delta: int,
    inv_freq: torch.Tensor | None,
) -> None:
    """Copies K and V of consecutive slots in all layers; K moves by `delta` positions (negative: back).

    Rotated in fp32 and rounded once to the arena's dtype. Source and target must not overlap. `inv_freq` may be None
    if delta is 0.
    """
    source_L2HTD = kv_NL2HBD[source_block, :, :, :, source_slot : source_slot + num_tokens]
    target_L2HTD = kv_NL2HBD[target_block, :, :, :, target_slot : target_slot + num_tokens]
    target_L2HTD.copy_(source_L2HTD)
    if delta:
        assert inv_freq is not None
        k_LHTD = source_L2HTD[:, K_SIDE]
        cos, sin = rope_tables(torch.tensor([delta]), inv_freq)
        flat_MHD = k_LHTD.to(torch.float32).reshape(1, -1, k_LHTD.shape[-1])
        target_L2HTD[:, K_SIDE].copy_(rotate(flat_MHD, cos, sin).reshape(k_LHTD.shape))
