"""Where K and V of a layer lie in an arena on a device, as the kernels take it (Place in src/common.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.platform.base.errors import KernelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Bytes from the start of the arena."""

    layer_offset: int
    block_stride: int
    side_stride: int
    #: From one kv head's K to the next one's, and of V: they differ where the precisions do.
    k_head_stride: int
    v_head_stride: int

    def arguments(self) -> tuple[np.int64, ...]:
        strides = (self.block_stride, self.side_stride, self.k_head_stride, self.v_head_stride)
        return tuple(map(np.int64, (self.layer_offset, *strides)))


def block_major(layout: BlockLayout, layer: int) -> Place:
    """The layout of kernels/layout.py: all layers of a block side by side. Raises KernelError for another layer."""
    return _place(layout, layer, layer * layout.layer_bytes, layout.block_bytes)


def layer_major(layout: BlockLayout, layer: int, num_blocks: int) -> Place:
    """All blocks of a layer side by side: only to measure what block-major costs."""
    return _place(layout, layer, layer * num_blocks * layout.layer_bytes, layout.layer_bytes)


def _place(layout: BlockLayout, layer: int, layer_offset: int, block_stride: int) -> Place:
    if not 0 <= layer < layout.num_layers:
        raise KernelError(f"layer {layer} of {layout.num_layers}")
    return Place(
        layer_offset=layer_offset,
        block_stride=block_stride,
        side_stride=layout.offset_bytes(block=0, layer=0, side=V_SIDE),
        k_head_stride=layout.head_bytes[K_SIDE],
        v_head_stride=layout.head_bytes[V_SIDE],
    )
