"""Writes blocks anew in another precision, on a device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from remora.kernels.base import KVMemory
from remora.kernels.cuda.device import Device
from remora.kernels.cuda.operations import check_rows
from remora.kernels.cuda.source import KV_FORMATS, CudaSource
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reencode_check import check_reencode


def reencode_blocks(
    device: Device, source: KVMemory, target: KVMemory, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> None:
    """Queues kernels.reference.reencode.reencode_blocks on memories of the device: the same promises and errors."""
    from_layout, to_layout = check_reencode(
        source, target, sources, targets, address_of=lambda data: int(device.address(data))
    )
    check_rows(from_layout)
    from_blocks, to_blocks = device.upload(sources), device.upload(targets)
    for side in (K_SIDE, V_SIDE):
        device.launch(
            CudaSource.of(
                "reencode_blocks",
                HEAD_DIM=from_layout.head_dim,
                FROM=KV_FORMATS[from_layout.precisions[side]],
                TO=KV_FORMATS[to_layout.precisions[side]],
            ),
            "reencode_blocks",
            grid=(len(sources), from_layout.num_layers, from_layout.num_kv_heads),
            threads=128,
            arguments=[
                *(device.address(source.data), device.address(from_blocks), *_strides(from_layout, side)),
                *(device.address(target.data), device.address(to_blocks), *_strides(to_layout, side)),
                np.int32(from_layout.block_tokens),
            ],
        )


def _strides(layout: BlockLayout, side: int) -> tuple[np.int64, ...]:
    """Of one side, in bytes: where it begins in a block, then from block to block, layer to layer, head to head."""
    start = layout.offset_bytes(block=0, layer=0, side=side)
    return tuple(map(np.int64, (start, layout.block_bytes, layout.layer_bytes, layout.head_bytes[side])))
