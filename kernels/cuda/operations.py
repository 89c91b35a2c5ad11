"""The other operations on KV, on a device.

Shapes: T tokens of the step, Q query heads, H kv heads, D head_dim, I hidden size. `data` is the arena as uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remora.kernels.cuda.device import Device, value_type
from remora.kernels.cuda.place import Place, block_major
from remora.kernels.cuda.source import KV_FORMATS, VALUE_TYPES, CudaSource
from remora.kernels.layout import BlockLayout
from remora.platform.base.errors import KernelError

_COPY_THREADS, _COPY_BYTES = 256, 64 * 1024
_CHECKSUM_THREADS, _CHECKSUM_BYTES = 256, 64 * 1024
_ALL_ONES = 0xFFFFFFFF


def store_kv(
    device: Device,
    *,
    qkv: Any,
    q_TQD: Any,
    positions_T: Any,
    block_T: Any,
    slot_T: Any,
    sequence_T: Any,
    not_finite_S: Any,
    inv_freq: Any,
    rope_factor: float,
    q_norm: Any,
    k_norm: Any,
    eps: float,
    data: Any,
    layout: BlockLayout,
    place: Place,
) -> None:
    """Queues norm (where q_norm and k_norm are given), rope and storage of a step's K and V; fills q_TQD.

    qkv [T][Q + 2 H][D]: queries, K, V. Token t goes to slot_T[t] of block_T[t], which the caller has checked, rounded
    or quantised. not_finite_S (uint8) becomes 1 at sequence_T[t] where the arena cannot hold a value of token t.
    """
    check_rows(layout)
    num_tokens, num_heads = int(q_TQD.shape[0]), int(q_TQD.shape[1])
    shape = (num_tokens, num_heads + 2 * layout.num_kv_heads, layout.head_dim)
    if tuple(qkv.shape) != shape or value_type(q_TQD) != value_type(qkv) or (q_norm is None) != (k_norm is None):
        raise KernelError(f"qkv {tuple(qkv.shape)} {qkv.dtype} is not {shape} {q_TQD.dtype}, or one norm is missing")
    source = store_source(layout, value_type(qkv))
    address = device.address
    device.launch(
        source,
        "store_kv",
        grid=(num_tokens, 1, 1),
        threads=128,
        arguments=[
            *(address(qkv), address(positions_T), address(block_T), address(slot_T), address(sequence_T)),
            *(address(inv_freq), np.float32(rope_factor), address(q_norm), address(k_norm), np.float32(eps)),
            *(address(q_TQD), address(not_finite_S), address(data)),
            *place.arguments(),
            np.int32(layout.block_tokens),
            np.int32(num_heads),
            np.int32(layout.num_kv_heads),
        ],
    )


def store_source(layout: BlockLayout, values: str) -> CudaSource:
    """What stores K and V, and rotates queries of type `values`."""
    return CudaSource.of("store_kv", VALUE_TYPE=VALUE_TYPES[values], **row_macros(layout))


def move_slots(device: Device, *, moves: NDArray[np.int32], inv_freq: Any, data: Any, layout: BlockLayout) -> None:
    """Queues copies of tokens to other slots, K rotated by `delta` positions and rounded or quantised once more.

    Rows of moves: source block, source slot, target block, target slot, tokens, delta. No target slot may be a source,
    but of itself; a slot that stays has its K rotated in place. Raises KernelError for a block outside the arena or
    a slot outside its block; then nothing is queued.
    """
    check_rows(layout)
    layout.check_blocks(data, moves[:, [0, 2]])
    slots, lengths = moves[:, [1, 3]], moves[:, 4:5]
    if moves.size and (slots.min() < 0 or lengths.min() < 0 or (slots + lengths > layout.block_tokens).any()):
        raise KernelError(f"a move lies outside a block of {layout.block_tokens} tokens")
    uploaded = device.upload(moves)
    place = block_major(layout, 0)
    device.launch(
        CudaSource.of("move_slots", **row_macros(layout)),
        "move_slots",
        grid=(len(moves), layout.num_layers, 2 * layout.num_kv_heads),
        threads=128,
        arguments=[
            *(device.address(uploaded), device.address(inv_freq), device.address(data)),
            np.int64(layout.layer_bytes),
            *place.arguments()[1:],
            np.int32(layout.block_tokens),
        ],
    )


def shift_k(device: Device, *, spans: NDArray[np.int32], inv_freq: Any, data: Any, layout: BlockLayout) -> None:
    """Queues the rotation of stored K in place. Rows of spans: block, first slot, end slot, delta; no slot may occur
    twice, and the blocks must not be shared. Raises KernelError as move_slots does."""
    block, first, end, delta = spans.T
    moves = np.stack((block, first, block, first, end - first, delta), axis=1)
    move_slots(device, moves=np.ascontiguousarray(moves), inv_freq=inv_freq, data=data, layout=layout)


def check_rows(layout: BlockLayout) -> None:
    """Raises KernelError for blocks whose rows the kernels do not write."""
    if layout.head_dim % 16 or layout.head_dim > 256:
        raise KernelError(f"head_dim {layout.head_dim}: CUDA kernels serve multiples of 16 up to 256")
    if layout.block_tokens % 16:
        raise KernelError(f"block_tokens {layout.block_tokens}: CUDA kernels serve multiples of 16")


def row_macros(layout: BlockLayout) -> dict[str, str | int]:
    """What kernels have to know of the rows that they read or write."""
    k, v = (KV_FORMATS[precision] for precision in layout.precisions)
    return {"HEAD_DIM": layout.head_dim, "K_FORMAT": k, "V_FORMAT": v}


def rms_norm(device: Device, *, x_TI: Any, weight_I: Any, eps: float, out_TI: Any, residual_TI: Any = None) -> None:
    """Queues out = norm(x) * weight; with a residual (fp32), x is added to it in place and the sum is normed."""
    num_rows, size = map(int, x_TI.shape)
    arrays = (x_TI, weight_I, residual_TI, out_TI)
    device.launch(
        CudaSource.of("rms_norm", VALUE_TYPE=VALUE_TYPES[value_type(x_TI)]),
        "rms_norm",
        grid=(num_rows, 1, 1),
        threads=256,
        arguments=[*(device.address(array) for array in arrays), np.int32(size), np.float32(eps)],
    )


def _pieces(layout: BlockLayout, piece_bytes: int) -> int:
    return -(-layout.block_bytes // piece_bytes)


def _copy(device: Device, layout: BlockLayout, read: Any, sources: Any, written: Any, targets: Any, count: int) -> None:
    device.launch(
        CudaSource.of("copy_blocks"),
        "copy_blocks",
        grid=(_pieces(layout, _COPY_BYTES), count, 1),
        threads=_COPY_THREADS,
        arguments=[
            *(device.address(array) for array in (read, sources, written, targets)),
            np.int64(layout.block_bytes),
        ],
    )


def copy_blocks(
    device: Device, layout: BlockLayout, data: Any, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> None:
    """Queues the copy of block sources[i] to targets[i], as if all sources were read before any target is written.

    Raises KernelError for an index outside the arena, unequal lengths or a target named twice; then nothing is queued.
    """
    if len(sources) != len(targets):
        raise KernelError(f"{len(sources)} source blocks for {len(targets)} target blocks")
    if len(np.unique(targets)) != len(targets):
        raise KernelError("a target block is named twice")
    layout.check_blocks(data, sources)
    layout.check_blocks(data, targets)
    if np.isin(sources, targets).any():
        scatter_blocks(device, layout, gather_blocks(device, layout, data, sources), data, targets)
    else:
        _copy(device, layout, data, device.upload(sources), data, device.upload(targets), len(sources))


def gather_blocks(device: Device, layout: BlockLayout, data: Any, blocks: NDArray[np.int32]) -> Any:
    """Queues the copy of blocks into a new staging buffer, side by side. Raises KernelError outside the arena."""
    layout.check_blocks(data, blocks)
    staging = device.empty((len(blocks), layout.block_bytes), np.uint8)
    _copy(device, layout, data, device.upload(blocks), staging, None, len(blocks))
    return staging


def scatter_blocks(device: Device, layout: BlockLayout, staging: Any, data: Any, blocks: NDArray[np.int32]) -> None:
    """Queues the copy of a staging buffer into blocks. Raises KernelError as copy_blocks does."""
    if len(np.unique(blocks)) != len(blocks):
        raise KernelError("a target block is named twice")
    if tuple(staging.shape) != (len(blocks), layout.block_bytes):
        raise KernelError(f"a staging buffer of {tuple(staging.shape)} for {len(blocks)} blocks")
    layout.check_blocks(data, blocks)
    _copy(device, layout, staging, None, data, device.upload(blocks), len(blocks))


def zero_blocks(device: Device, layout: BlockLayout, data: Any, blocks: NDArray[np.int32]) -> None:
    """Queues zeros over whole blocks. Raises KernelError outside the arena."""
    layout.check_blocks(data, blocks)
    uploaded = device.upload(blocks)
    device.launch(
        CudaSource.of("zero_blocks"),
        "zero_blocks",
        grid=(_pieces(layout, _COPY_BYTES), len(blocks), 1),
        threads=_COPY_THREADS,
        arguments=[device.address(data), device.address(uploaded), np.int64(layout.block_bytes)],
    )


def block_checksums(device: Device, layout: BlockLayout, data: Any, blocks: Sequence[int]) -> list[int]:
    """CRC-32 (zlib) of all bytes of each block, padding included; waits. Raises KernelError outside the arena."""
    indices = np.asarray(blocks, np.int32)
    layout.check_blocks(data, indices)
    uploaded = device.upload(indices)
    sums = device.upload(np.full(len(indices), _ALL_ONES, np.uint32))
    device.launch(
        CudaSource.of("checksum"),
        "checksum",
        grid=(_pieces(layout, _CHECKSUM_BYTES), len(indices), 1),
        threads=_CHECKSUM_THREADS,
        arguments=[
            *(device.address(data), device.address(uploaded), np.int64(layout.block_bytes)),
            device.address(sums),
        ],
    )
    return [int(checksum) for checksum in device.download(sums)]
