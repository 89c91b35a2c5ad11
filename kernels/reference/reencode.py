"""Writes blocks anew in another precision of K and V: quantise, dequantise and every step between."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.base import KVMemory
from remora.kernels.layout import K_SIDE, V_SIDE
from remora.kernels.reencode_check import check_reencode
from remora.kernels.reference.kv_view import KVView


def reencode_blocks(source: KVMemory, target: KVMemory, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
    """Block sources[i] of `source` becomes block targets[i] of `target` in the target's precisions, all layers.

    The memories may share bytes (two views of one arena) as long as no target's bytes are a source's: a block is never
    re-encoded in place. A side of equal precision is copied. Values that are not finite stay marked.

    Raises KernelError for geometries that differ in more than precision, an index outside, unequal lengths, a target
    named twice or one that overlaps a source; then nothing is written.
    """
    from_layout, to_layout = check_reencode(source, target, sources, targets)
    if not len(sources):
        return
    from_view, to_view = KVView(from_layout, source.data), KVView(to_layout, target.data)
    from_blocks, to_blocks = torch.from_numpy(sources).long(), torch.from_numpy(targets).long()
    for side in (K_SIDE, V_SIDE):
        if from_layout.precisions[side] == to_layout.precisions[side]:
            to_layout.rows_view(target.data, side)[targets] = from_layout.rows_view(source.data, side)[sources]
            to_layout.scales_view(target.data, side)[targets] = from_layout.scales_view(source.data, side)[sources]
            continue
        for layer in range(from_layout.num_layers):
            rows_nHBD = from_view.read(side, layer, from_blocks)
            for slot in range(from_layout.block_tokens):
                slots = torch.full_like(to_blocks, slot)
                to_view.write(side, layer, to_blocks, slots, rows_nHBD[:, :, slot])
