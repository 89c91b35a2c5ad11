"""Stores K and V of a step's tokens into their blocks.

Shapes: T tokens, H kv heads, D head_dim, N blocks of an arena, L layers, B tokens a block.
"""

from __future__ import annotations

import torch

from remora.kernels.layout import K_SIDE, V_SIDE


def store_kv(
    kv_NL2HBD: torch.Tensor,
    *,
    layer: int,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    block_T: torch.Tensor,
    slot_T: torch.Tensor,
) -> None:
    """Writes row t of K (already rotated) and V to slot `slot_T[t]` of block `block_T[t]`.

    Values are rounded to the arena's dtype.
    """
    dtype = kv_NL2HBD.dtype
    kv_NL2HBD[block_T, layer, K_SIDE, :, slot_T] = k_THD.to(dtype)
    kv_NL2HBD[block_T, layer, V_SIDE, :, slot_T] = v_THD.to(dtype)
