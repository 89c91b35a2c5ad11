"""Stores K and V of a step's tokens into their blocks.

Shapes: T tokens, H kv heads, D head_dim, N blocks of an arena, L layers, B tokens a block.
"""

from __future__ import annotations

import torch

from remora.kernels.layout import K_SIDE, V_SIDE
from remora.kernels.reference.kv_view import KVView


def store_kv(
    kv: torch.Tensor | KVView,
    *,
    layer: int,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    block_T: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """Writes row t of K (already rotated) and V to slot `slot_T[t]` of block `block_T[t]`.

    Values are rounded or quantised to the arena's precision. `kv` is the arena as kv_NL2HBD, or its view.
    Returns which rows it could hold [T]: not those with a NaN, an infinity, or what becomes one.
    """
    fits_T = torch.ones(len(k_THD), dtype=torch.bool)
    for side, rows_THD in ((K_SIDE, k_THD), (V_SIDE, v_THD)):
        if isinstance(kv, KVView):
            fits_T &= kv.write(side, layer, block_T, slot_T, rows_THD)
        else:
            rounded_THD = rows_THD.to(kv.dtype)
            fits_T &= torch.isfinite(rounded_THD).flatten(1).all(dim=1)
            kv[block_T, layer, side, :, slot_T] = rounded_THD
    return fits_T
