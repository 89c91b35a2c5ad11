"""K and V of an arena in any precision, as rows of fp32 that are written and read: the oracle of what is stored.

Shapes: T tokens, N blocks of an arena, n blocks that are read, L layers, H kv heads, B tokens a block, D head_dim.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.layout import BlockLayout
from remora.kernels.reference.quantise import dequantise, quantise
from remora.namespaces.geometry import QUANTISED

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
        if precision in QUANTISED:
            codes, scales = quantise(rows_THD, precision)
            self._scales[side][block_T, layer, :, slot_T] = scales
            held = scales
        else:
            held = rows_THD.to(_DTYPES[precision]).contiguous()
            codes = held.view(torch.uint8)
        self._rows[side][block_T, layer, :, slot_T] = codes
        return torch.isfinite(held).flatten(1).all(dim=1)

    def read(self, side: int, layer: int | slice, blocks: torch.Tensor) -> torch.Tensor:
        """[n, H, B, D] in fp32; with a slice of layers [n, l, H, B, D]."""
        precision = self.layout.precisions[side]
        codes = self._rows[side][blocks, layer]
        if precision in QUANTISED:
            return dequantise(codes, self._scales[side][blocks, layer], self.layout.head_dim, precision)
        return codes.contiguous().view(_DTYPES[precision]).to(torch.float32)
