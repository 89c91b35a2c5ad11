"""Moves stored K to other positions: rope is a rotation, so a shift by n positions is one more rotation.

Shapes: N blocks, L layers, H kv heads, B tokens a block, D head_dim.
"""

from __future__ import annotations

import torch

from remora.kernels.layout import K_SIDE
from remora.kernels.reference.rope import rope_tables, rotate


def shift_k(
    kv_NL2HBD: torch.Tensor, *, block: int, first_slot: int, end_slot: int, delta: int, inv_freq: torch.Tensor
) -> None:
    """Rotates K of slots first_slot:end_slot of one block, in all layers, by `delta` positions (negative: back).

    Computed in fp32 and rounded once to the arena's dtype. The block must not be shared: K changes in place.
    """
    k_LHBD = kv_NL2HBD[block, :, K_SIDE, :, first_slot:end_slot]
    cos, sin = rope_tables(torch.tensor([delta]), inv_freq)
    flat_MHD = k_LHBD.to(torch.float32).reshape(1, -1, k_LHBD.shape[-1])
    k_LHBD.copy_(rotate(flat_MHD, cos, sin).reshape(k_LHBD.shape))
