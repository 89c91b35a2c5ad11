"""Native K/V storage, re-encoding and paged attention by themselves, on numpy arrays: for tests, benchmarks and tools.

Shapes: T tokens of the step, Q query heads, H kv heads, D head_dim.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remora.kernels.base import KVMemory
from remora.kernels.batch import StepBatch
from remora.kernels.layout import BlockLayout
from remora.kernels.native.library import ArenaStruct, StepStruct, load_library
from remora.kernels.reencode_check import check_reencode
from remora.platform.base.errors import KernelError

Float32 = NDArray[np.float32]

_STEP, _ARENA = ctypes.POINTER(StepStruct), ctypes.POINTER(ArenaStruct)
_INT, _ADDRESS = ctypes.c_int32, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "remora_store_kv": [_INT, _INT, _STEP, _ARENA, _INT, _ADDRESS, _ADDRESS],
    "remora_reencode_blocks": [_INT, _INT, _ARENA, _ARENA, _ADDRESS, _ADDRESS, ctypes.c_int64],
    "remora_attention": [
        *(_INT, _INT, _STEP, _ARENA, _INT, _INT, _INT, _INT),
        *(ctypes.c_float, _ADDRESS, _ADDRESS, _ADDRESS),
    ],
}
#: Positions whose scores are reduced together: ATTENTION_CHUNK of remora.h.
CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionResult:
    """Of the last layer that was run; lse is the natural log of the sum of exponentials."""

    out_TQD: Float32
    lse_TQ: Float32


def _function(name: str) -> Any:
    function = getattr(load_library().functions, name)
    function.restype, function.argtypes = _INT, _SIGNATURES[name]
    return function


def _rows(array: Float32, name: str, shape: tuple[int, ...]) -> Float32:
    if array.dtype != np.float32 or array.shape != shape:
        raise KernelError(f"{name} must be fp32 {shape}, not {array.dtype} {array.shape}")
    return np.ascontiguousarray(array)


def _arena_struct(memory: KVMemory, layout: BlockLayout) -> ArenaStruct:
    if layout.head_dim % 16 or layout.head_dim > 256:
        raise KernelError(f"head_dim {layout.head_dim}: native attention serves multiples of 16 up to 256")
    if layout.block_tokens % 16 or CHUNK_TOKENS % layout.block_tokens:
        raise KernelError(f"block_tokens {layout.block_tokens}: native attention serves 16, 32, 64, 128, 256 and 512")
    arena = ArenaStruct.of(layout)
    arena.point_at(memory.data)
    return arena


def _step_struct(batch: StepBatch, memory: KVMemory, layout: BlockLayout) -> StepStruct:
    for row in range(batch.num_sequences):
        num_columns = -(-int(batch.context_len_S[row]) // layout.block_tokens)
        if num_columns > batch.block_table_SB.shape[1]:
            raise KernelError(f"{int(batch.context_len_S[row])} tokens need {num_columns} columns of the block table")
        layout.check_blocks(memory.data, batch.block_table_SB[row, :num_columns])
    return StepStruct(
        token_ids=batch.token_ids_T.ctypes.data,
        positions=batch.positions_T.ctypes.data,
        query_start=batch.query_start_S.ctypes.data,
        context_len=batch.context_len_S.ctypes.data,
        block_table=batch.block_table_SB.ctypes.data,
        logit_rows=batch.logit_rows_R.ctypes.data,
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        num_logit_rows=batch.num_logit_rows,
        table_stride=batch.block_table_SB.shape[1],
        not_finite=batch.not_finite_S.ctypes.data,
    )


def store_kv(
    batch: StepBatch,
    memory: KVMemory,
    k_THD: Float32,
    v_THD: Float32,
    *,
    layer: int,
    level: str | None = None,
    num_threads: int = 1,
) -> None:
    """Writes the step's K (already rotated) and V into their slots, rounded or quantised to the arena's precisions.

    Sequences with a value that the precision cannot hold (NaN, infinity) are marked in `batch.not_finite_S`.

    Raises KernelError for a shape that is not served or a block outside the memory; then nothing is written.
    """
    layout = BlockLayout(memory.geometry)
    arena, step = _arena_struct(memory, layout), _step_struct(batch, memory, layout)
    _check_layers(layout, layer, 1)
    shape = (batch.num_tokens, layout.num_kv_heads, layout.head_dim)
    k, v = _rows(k_THD, "k", shape), _rows(v_THD, "v", shape)
    number = load_library().level_number(level)
    status = _function("remora_store_kv")(number, num_threads, step, arena, layer, k.ctypes.data, v.ctypes.data)
    if status < 0:
        raise KernelError("native store_kv ran out of memory")


def paged_attention(
    batch: StepBatch,
    memory: KVMemory,
    q_TQD: Float32,
    *,
    layer: int,
    scale: float,
    num_layers: int = 1,
    repeats: int = 1,
    level: str | None = None,
    num_threads: int = 1,
) -> AttentionResult:
    """Attention of the step's rows over their sequences' blocks, in place.

    For benchmarks, `num_layers` layers from `layer` on are run with the same queries, `repeats` times. Raises
    KernelError for a shape that is not served or a block outside the memory.
    """
    layout = BlockLayout(memory.geometry)
    arena, step = _arena_struct(memory, layout), _step_struct(batch, memory, layout)
    _check_layers(layout, layer, num_layers)
    num_heads = q_TQD.shape[1] if q_TQD.ndim == 3 else 0
    if num_heads == 0 or num_heads % layout.num_kv_heads:
        raise KernelError(f"queries {q_TQD.shape} do not fit {layout.num_kv_heads} kv heads")
    q = _rows(q_TQD, "q", (batch.num_tokens, num_heads, layout.head_dim))
    out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
    number = load_library().level_number(level)
    status = _function("remora_attention")(
        *(number, num_threads, step, arena, layer, num_layers, repeats, num_heads),
        *(scale, q.ctypes.data, out.ctypes.data, lse.ctypes.data),
    )
    if status < 0:
        raise KernelError("native attention ran out of memory")
    return AttentionResult(out_TQD=out, lse_TQ=lse)


def reencode_blocks(
    source: KVMemory,
    target: KVMemory,
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    *,
    level: str | None = None,
    num_threads: int = 1,
) -> None:
    """Native kernels.reference.reencode.reencode_blocks: the same promises and errors."""
    from_layout, to_layout = check_reencode(source, target, sources, targets)
    number = load_library().level_number(level)
    status = _function("remora_reencode_blocks")(
        *(number, num_threads, _arena_struct(source, from_layout), _arena_struct(target, to_layout)),
        *(np.ascontiguousarray(sources).ctypes.data, np.ascontiguousarray(targets).ctypes.data, len(sources)),
    )
    if status < 0:
        raise KernelError("native re-encoding ran out of memory")


def _check_layers(layout: BlockLayout, layer: int, num_layers: int) -> None:
    if layer < 0 or num_layers < 1 or layer + num_layers > layout.num_layers:
        raise KernelError(f"layers {layer} to {layer + num_layers - 1} of {layout.num_layers}")
