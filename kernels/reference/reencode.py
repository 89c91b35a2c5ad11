"""Writes blocks anew in another precision of K and V: quantise, dequantise and every step between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.base import KVMemory
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reference.kv_view import KVView
from remora.platform.base.errors import KernelError


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


def _host_address(data: NDArray[np.uint8]) -> int:
    return data.ctypes.data


def check_reencode(
    source: KVMemory,
    target: KVMemory,
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    *,
    address_of: Callable[[NDArray[np.uint8]], int] = _host_address,
) -> tuple[BlockLayout, BlockLayout]:
    """The layouts of both sides. `address_of` gives the address of a memory's first byte.

    Raises KernelError as reencode_blocks says.
    """
    from_layout, to_layout = BlockLayout(source.geometry), BlockLayout(target.geometry)
    if not source.geometry.differs_in_precision_only(target.geometry):
        raise KernelError(f"{source.geometry} and {target.geometry} differ in more than precision")
    if len(sources) != len(targets) or len(np.unique(targets)) != len(targets):
        raise KernelError(f"{len(sources)} source blocks for {len(np.unique(targets))} different target blocks")
    from_layout.check_blocks(source.data, sources)
    to_layout.check_blocks(target.data, targets)
    # Targets lie apart from each other: only the last one that begins before a source ends can reach into it.
    read = address_of(source.data) + sources.astype(np.int64) * from_layout.block_bytes
    written = np.sort(address_of(target.data) + targets.astype(np.int64) * to_layout.block_bytes)
    last = np.searchsorted(written, read + from_layout.block_bytes) - 1
    if len(written) and ((last >= 0) & (written[last] + to_layout.block_bytes > read)).any():
        raise KernelError("a target block overlaps a source block: blocks are re-encoded into other blocks")
    return from_layout, to_layout
