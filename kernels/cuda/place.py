"""Where K and V of a layer lie in an arena on a device, as the kernels take it (Place in src/common.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remora.kernels.layout import BlockLayout
from remora.platform.base.errors import KernelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Bytes from the start of the arena."""

    layer_offset: int
    block_stride: int
    side_stride: int
    head_stride: int

    def arguments(self) -> tuple[np.int64, ...]:
        return tuple(map(np.int64, (self.layer_offset, self.block_stride, self.side_stride, self.head_stride)))


def block_major(layout: BlockLayout, layer: int) -> Place:
    """The layout of kernels/layout.py: all layers of a block side by side. Raises KernelError for another layer."""
    _check(layout, layer)
    return Place(
        layer_offset=layout.offset_bytes(block=0, layer=layer, side=0),
        block_stride=layout.block_bytes,
        side_stride=layout.offset_bytes(block=0, layer=0, side=1),
        head_stride=layout.offset_bytes(block=0, layer=0, side=0, kv_head=1),
    )


def layer_major(layout: BlockLayout, layer: int, num_blocks: int) -> Place:
    """All blocks of a layer side by side: only to measure what block-major costs."""
    _check(layout, layer)
    layer_bytes = layout.offset_bytes(block=0, layer=1, side=0)
    return Place(
        layer_offset=layer * num_blocks * layer_bytes,
        block_stride=layer_bytes,
        side_stride=layout.offset_bytes(block=0, layer=0, side=1),
        head_stride=layout.offset_bytes(block=0, layer=0, side=0, kv_head=1),
    )


def _check(layout: BlockLayout, layer: int) -> None:
    if not 0 <= layer < layout.num_layers:
        raise KernelError(f"layer {layer} of {layout.num_layers}")
