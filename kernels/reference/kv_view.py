"""K and V of an arena in any precision, as rows of fp32 that are written and read: the oracle of what is stored.

Shapes: T tokens, N blocks of an arena, n blocks that are read, L layers, H kv heads, B tokens a block, D head_dim.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.layout import BlockLayout
from remora.kernels.reference.row_codec import TORCH_DTYPES, decode_rows, encode_rows
from remora.namespaces.geometry import QUANTISED


class KVView:
    """Reads and writes an arena in place; owns no memory."""

    def __init__(self, layout: BlockLayout, data: NDArray[np.uint8]) -> None:
        self.layout = layout
        # Bytes [N, L, H, B, bytes] and scales [N, L, H, B, G] of K and of V.
        self._rows = [torch.from_numpy(layout.rows_view(data, side)) for side in (0, 1)]
        self._scales = [torch.from_numpy(layout.scales_view(data, side)).view(torch.bfloat16) for side in (0, 1)]

    def write(
        self, side: int, layer: int, block_T: torch.Tensor, slot_T: torch.Tensor, rows_THD: torch.Tensor
    ) -> torch.Tensor:
        """Row t goes to slot `slot_T[t]` of block `block_T[t]`, rounded or quantised to the side's precision.

        Returns which rows could be held [T]: not those with a NaN, an infinity, or what becomes one.
        """
        precision = self.layout.precisions[side]
        codes, held = encode_rows(rows_THD, precision)
        self._rows[side][block_T, layer, :, slot_T] = codes
        if precision in QUANTISED:
            self._scales[side][block_T, layer, :, slot_T] = held
        else:
            held = codes.view(TORCH_DTYPES[precision])
        return torch.isfinite(held).flatten(1).all(dim=1)

    def read(self, side: int, layer: int | slice, blocks: torch.Tensor) -> torch.Tensor:
        """[n, H, B, D] in fp32; with a slice of layers [n, l, H, B, D]."""
        codes, scales = self._rows[side][blocks, layer], self._scales[side][blocks, layer]
        return decode_rows(codes, scales, self.layout.head_dim, self.layout.precisions[side])
