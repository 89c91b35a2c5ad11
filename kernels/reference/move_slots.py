"""Copies slots of blocks to other blocks, K rotated to other positions: what an edit of a sequence needs.

Shapes: N blocks, L layers, H kv heads, B tokens a block, D head_dim, M tokens that move.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reference.rope import rope_tables, rotate
from remora.kernels.reference.row_codec import decode_rows, encode_rows

#: Tokens that are rotated at once: a few MiB in fp32 for common models.
_MAX_TOKENS = 128


def move_slots(
    layout: BlockLayout,
    data: NDArray[np.uint8],
    *,
    source_blocks_M: torch.Tensor,
    source_slots_M: torch.Tensor,
    target_blocks_M: torch.Tensor,
    target_slots_M: torch.Tensor,
    delta: int,
    inv_freq: torch.Tensor,
) -> None:
    """Copies K and V of each token in all layers; K moves by `delta` positions (negative: back).

    V, and K that keeps its position, are copied as they are. K that moves is rotated in fp32 and rounded or quantised
    once more to the arena's precision. No source may be a target.
    """
    for side in (K_SIDE, V_SIDE):
        rows_NLHB = torch.from_numpy(layout.rows_view(data, side))
        scales_NLHB = torch.from_numpy(layout.scales_view(data, side)).view(torch.bfloat16)
        for start in range(0, len(source_blocks_M), _MAX_TOKENS):
            part = slice(start, start + _MAX_TOKENS)
            source = (source_blocks_M[part], slice(None), slice(None), source_slots_M[part])
            target = (target_blocks_M[part], slice(None), slice(None), target_slots_M[part])
            codes_MLH, scales_MLH = rows_NLHB[source], scales_NLHB[source]
            if side == K_SIDE and delta:
                codes_MLH, scales_MLH = _turned(layout, codes_MLH, scales_MLH, delta, inv_freq)
            rows_NLHB[target] = codes_MLH
            if layout.num_scales[side]:
                scales_NLHB[target] = scales_MLH


def _turned(
    layout: BlockLayout, codes: torch.Tensor, scales: torch.Tensor, delta: int, inv_freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scales of K after `delta` positions."""
    precision = layout.precisions[K_SIDE]
    values = decode_rows(codes, scales, layout.head_dim, precision)
    rows_1MD = values.reshape(1, -1, layout.head_dim)
    turned = rotate(rows_1MD, *rope_tables(torch.tensor([delta]), inv_freq)).reshape(values.shape)
    return encode_rows(turned, precision)
