"""Paged attention on a device, and the merge of two results.

Shapes: T tokens of the step, S sequences, Q query heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np

from remora.kernels.batch import StepBatch
from remora.kernels.cuda.attention_plan import CHUNK_TOKENS, AttentionPlan
from remora.kernels.cuda.device import Device, upload_together, value_type
from remora.kernels.cuda.operations import row_macros
from remora.kernels.cuda.place import Place
from remora.kernels.cuda.source import VALUE_TYPES, CudaSource
from remora.kernels.layout import BlockLayout
from remora.platform.base.errors import KernelError

_THREADS = 128
_STAGED_TOKENS = 64
_MAX_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """A step and its plan in device memory: uploaded once, read by every layer."""

    plan: AttentionPlan
    positions_T: Any
    block_table_SB: Any
    items_I8: Any
    row_token_E: Any
    part_index_T: Any
    split_tokens_P: Any
    #: Scratch for parts of split tokens, fp32.
    parts: Any


def check_shape(layout: BlockLayout, num_heads: int) -> None:
    """Raises KernelError for what the CUDA attention does not serve."""
    if layout.head_dim % 16 or layout.head_dim > _MAX_HEAD_DIM:
        raise KernelError(f"head_dim {layout.head_dim}: CUDA attention serves multiples of 16 up to {_MAX_HEAD_DIM}")
    if layout.block_tokens % 16 or CHUNK_TOKENS % layout.block_tokens:
        raise KernelError(f"block_tokens {layout.block_tokens}: CUDA attention serves 16, 32, 64, 128, 256 and 512")
    if num_heads <= 0 or num_heads % layout.num_kv_heads:
        raise KernelError(f"{num_heads} query heads do not fit {layout.num_kv_heads} kv heads")


def check_tables(batch: StepBatch, layout: BlockLayout, data: Any) -> int:
    """The columns that the longest sequence uses. Raises KernelError when a sequence's blocks do not suffice or lie
    outside `data`."""
    lengths_S = batch.context_len_S[: batch.num_sequences]
    columns_S = -(-lengths_S // layout.block_tokens)
    num_columns = int(columns_S.max(initial=0))
    if num_columns > batch.block_table_SB.shape[1]:
        raise KernelError(f"{lengths_S.max()} tokens need {num_columns} columns of the block table")
    is_used_SB = np.arange(num_columns) < columns_S[:, None]
    layout.check_blocks(data, batch.block_table_SB[: batch.num_sequences, :num_columns][is_used_SB])
    return num_columns


def upload_step(
    device: Device, batch: StepBatch, plan: AttentionPlan, layout: BlockLayout, data: Any, num_heads: int
) -> DeviceStep:
    """Raises KernelError, before anything is queued, for a block outside `data` or a shape that is not served."""
    check_shape(layout, num_heads)
    num_columns = check_tables(batch, layout, data)
    positions_T, block_table_SB = upload_together(
        device, [batch.positions_T[: batch.num_tokens], batch.block_table_SB[: batch.num_sequences, :num_columns]]
    )
    parts = parts_scratch(device, plan.num_parts, layout, num_heads)
    return with_plan(device, plan, positions_T, block_table_SB, parts)


def parts_scratch(device: Device, num_parts: int, layout: BlockLayout, num_heads: int) -> Any:
    """Room for the parts of split tokens: of a layer at a time."""
    return device.empty((num_parts, num_heads, layout.head_dim + 2), np.float32)


def with_plan(device: Device, plan: AttentionPlan, positions_T: Any, block_table_SB: Any, parts: Any) -> DeviceStep:
    """A step whose positions and tables are on the device already, and are the caller's to check."""
    items_I8, row_token_E, part_index_T, split_tokens_P = upload_together(
        device, [plan.items_I8, plan.row_token_E, plan.part_index_T, plan.split_tokens_P]
    )
    return DeviceStep(
        plan=plan,
        positions_T=positions_T,
        block_table_SB=block_table_SB,
        items_I8=items_I8,
        row_token_E=row_token_E,
        part_index_T=part_index_T,
        split_tokens_P=split_tokens_P,
        parts=parts,
    )


def attention_source(layout: BlockLayout, values: str, tile_rows: int) -> CudaSource:
    """What attends with queries of type `values` in tiles of so many rows."""
    return CudaSource.of("paged_attention", ROWS=tile_rows, VALUE_TYPE=VALUE_TYPES[values], **row_macros(layout))


def paged_attention(
    device: Device,
    step: DeviceStep,
    *,
    q_TQD: Any,
    out_TQD: Any,
    lse_TQ: Any,
    data: Any,
    layout: BlockLayout,
    place: Place,
    scale: float,
) -> None:
    """Queues the attention of one layer: fills out (the type of q) and lse (fp32, natural log).

    q is rotated. K and V of the step are stored by launches before. Row t sees positions 0 up to its own.
    """
    num_heads = int(q_TQD.shape[1])
    check_shape(layout, num_heads)
    group = num_heads // layout.num_kv_heads
    head_dim, rows = layout.head_dim, step.plan.tile_rows
    if tuple(q_TQD.shape[1:]) != (num_heads, head_dim) or value_type(out_TQD) != value_type(q_TQD):
        raise KernelError(f"queries {tuple(q_TQD.shape)} and outputs {out_TQD.dtype} do not fit head_dim {head_dim}")
    source = attention_source(layout, value_type(q_TQD), rows)
    address = device.address
    device.launch(
        source,
        "paged_attention",
        grid=(len(step.plan.items_I8), layout.num_kv_heads, 1),
        threads=_THREADS,
        shared_bytes=4 * rows * (head_dim + CHUNK_TOKENS + 4) + _staged_bytes(layout),
        arguments=[
            *(address(step.items_I8), address(step.row_token_E), address(step.positions_T)),
            *(address(step.block_table_SB), np.int64(step.block_table_SB.shape[1])),
            *(address(q_TQD), address(out_TQD), address(lse_TQ), address(step.parts), address(step.part_index_T)),
            address(data),
            *place.arguments(),
            np.int32(layout.block_tokens.bit_length() - 1),
            *(np.int32(num_heads), np.int32(group), np.float32(scale * log2(np.e))),
        ],
    )
    device.launch(
        source,
        "merge_chunks",
        grid=(len(step.plan.split_tokens_P), num_heads, 1),
        threads=head_dim,
        arguments=[
            *(address(step.split_tokens_P), address(step.positions_T), address(step.parts)),
            *(address(step.part_index_T), address(out_TQD), address(lse_TQ), np.int32(num_heads)),
        ],
    )


def _staged_bytes(layout: BlockLayout) -> int:
    """Shared memory of a tile of K or V with its scales: Staging of src/paged_attention.cu."""
    strides = []
    for size in layout.row_bytes:
        unit = 16 if size % 16 == 0 else 8
        strides.append((size // unit | 1) * unit)
    return _STAGED_TOKENS * (max(strides) + 4 * max(layout.num_scales))


def merge_attention(
    device: Device, *, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out_TQD: Any, lse_TQ: Any
) -> None:
    """Queues the join of attention over two disjoint sets of positions; out and lse may be those of a."""
    num_rows, head_dim = int(out_a.shape[0]) * int(out_a.shape[1]), int(out_a.shape[2])
    source = CudaSource.of("merge_attention", HEAD_DIM=head_dim, VALUE_TYPE=VALUE_TYPES[value_type(out_a)])
    arrays = (out_a, lse_a, out_b, lse_b, out_TQD, lse_TQ)
    device.launch(
        source,
        "merge_attention",
        grid=(num_rows, 1, 1),
        threads=head_dim,
        arguments=[device.address(array) for array in arrays],
    )
