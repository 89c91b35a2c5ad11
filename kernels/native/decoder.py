"""The decoder in native CPU code: one C call a step. Shapes: T tokens of the step, H hidden size, R rows with
logits, V vocabulary.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remora.kernels.base import DecoderShape, KVMemory, Weights
from remora.kernels.batch import StepBatch
from remora.kernels.layout import BlockLayout, Layouts
from remora.kernels.native.library import LEVELS, ArenaStruct, StepStruct, load_library
from remora.kernels.native.packed_weights import PackedManifest, PackedWeights, adopt_weights, shape_struct
from remora.kernels.native.weight_memory import WeightMemory
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError


def worker_cores(num_threads: int) -> list[int]:
    """Cores for all threads but the caller's, a core each; -1 (any) where there are fewer cores than threads."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < num_threads:
        return [-1] * (num_threads - 1)
    return cores[1:num_threads]


class NativeDecoder:
    """kernels.base.Decoder in C++. Packs the weights at construction and keeps no reference to the tensors.

    Threads sleep between steps; the thread that calls `forward` is one of them.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: Weights | PackedWeights,
        geometry: KVGeometry,
        num_threads: int,
        *,
        level: str | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        """`level` forces an instruction-set level; None takes the best, or what REMORA_NATIVE_ISA names. `memory`:
        where to pack, at least max_packed_bytes; None: memory of its own. Packed weights are used where they lie.

        Raises KernelError when geometry or weights do not fit the shape, or a size is not served.
        """
        self._library = load_library()
        self._functions = self._library.functions
        self._shape, self._layouts = shape, Layouts(geometry)
        self._arenas = {geometry: _arena_struct(shape, self._layouts.own)}
        self._step = StepStruct()
        if isinstance(weights, PackedWeights):
            self._memory: WeightMemory | None = weights.memory
            tied_head = weights.manifest.tied_head
        else:
            self._memory = memory
            # int8 and int4 have a head of their own beside the embedding, whose rows are looked up in bf16.
            tied_head = (shape.has_embedding and shape.has_head and "lm_head" not in weights) and shape.weights not in (
                "int8",
                "int4",
            )
        cores = worker_cores(num_threads)
        self._handle = self._functions.remora_decoder_create(
            ctypes.byref(shape_struct(shape, tied_head=tied_head)),
            self._library.level_number(level),
            num_threads,
            (ctypes.c_int32 * len(cores))(*cores),
            None if self._memory is None else self._memory.address,
            0 if self._memory is None else self._memory.num_bytes,
            isinstance(weights, PackedWeights),
        )
        if not self._handle:
            raise self._library.error()
        # The memory is an argument: it is there for as long as the decoder is.
        self._finalizer = weakref.finalize(self, _destroy, self._functions, self._handle, self._memory)
        if isinstance(weights, PackedWeights):
            self._manifest = weights.manifest
            adopt_weights(self._library, self._handle, weights.manifest)
        else:
            from remora.kernels.native.packer import pack_weights

            self._manifest = pack_weights(self._library, self._handle, shape, weights, tied_head=tied_head)

    @property
    def manifest(self) -> PackedManifest:
        """With it and the memory that the weights were packed in, another decoder can be made of packed weights."""
        return self._manifest

    @property
    def packed(self) -> PackedWeights | None:
        """Its weights, for another decoder; None where it has memory of its own."""
        return None if self._memory is None else PackedWeights(self._manifest, self._memory)

    @property
    def batch_invariant(self) -> bool:
        return True

    @property
    def level(self) -> str:
        """Instruction-set level in use."""
        return LEVELS[self._functions.remora_decoder_level(self._handle)]

    @property
    def name(self) -> str:
        return f"native-{self.level}-{self._shape.weights}"

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return int(self._functions.remora_decoder_weight_bytes(self._handle))

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raises KernelError for a geometry that differs from the decoder's in more than precision or is not served."""
        self._arena_of(geometry)

    def _arena_of(self, geometry: KVGeometry) -> ArenaStruct:
        arena = self._arenas.get(geometry)
        if arena is None:
            arena = self._arenas[geometry] = _arena_struct(self._shape, self._layouts.find(geometry))
        return arena

    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        """Stores the step's K/V in `memory` and returns logits_RV, valid until the next call.

        Raises KernelError, before anything is written, for a block index outside the memory, a token outside the
        vocabulary or a geometry as in check_geometry. Marks sequences in `batch.not_finite_S`.
        """
        return self.forward_stage(batch, memory, None)

    def forward_stage(
        self, batch: StepBatch, memory: KVMemory, hidden_TH: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """As `forward`, for a stage: kernels.base.StageDecoder."""
        stream_TH = (batch.num_tokens, self._shape.hidden_size)
        if hidden_TH is not None and (hidden_TH.shape != stream_TH or not hidden_TH.flags.c_contiguous):
            raise KernelError(f"hidden states of shape {hidden_TH.shape} instead of {stream_TH}, row after row")
        arena = self._arena_of(memory.geometry)
        arena.point_at(memory.data)
        self._point_at(batch)
        self._step.hidden = None if hidden_TH is None else hidden_TH.ctypes.data
        batch.not_finite_S[: batch.num_sequences] = 0
        result = self._functions.remora_decoder_run(self._handle, ctypes.byref(self._step), ctypes.byref(arena))
        if not result:
            raise self._library.error()
        values = ctypes.cast(result, ctypes.POINTER(ctypes.c_float))
        shape = (batch.num_logit_rows, self._shape.vocab_size) if self._shape.has_head else stream_TH
        return np.ctypeslib.as_array(values, shape=shape)

    def _point_at(self, batch: StepBatch) -> None:
        step = self._step
        step.token_ids = batch.token_ids_T.ctypes.data
        step.positions = batch.positions_T.ctypes.data
        step.query_start = batch.query_start_S.ctypes.data
        step.context_len = batch.context_len_S.ctypes.data
        step.block_table = batch.block_table_SB.ctypes.data
        step.logit_rows = batch.logit_rows_R.ctypes.data
        step.num_tokens = batch.num_tokens
        step.num_sequences = batch.num_sequences
        step.num_logit_rows = batch.num_logit_rows
        step.table_stride = batch.block_table_SB.shape[1]
        step.not_finite = batch.not_finite_S.ctypes.data


def _destroy(functions: Any, handle: int, memory: WeightMemory | None) -> None:
    functions.remora_decoder_destroy(handle)


def _arena_struct(shape: DecoderShape, layout: BlockLayout) -> ArenaStruct:
    """The part of the arena that stays the same. Raises KernelError when the geometry does not fit the shape."""
    fits = (layout.num_layers, layout.num_kv_heads, layout.head_dim)
    if fits != (shape.num_layers, shape.num_kv_heads, shape.head_dim):
        raise KernelError(f"KV geometry {layout.geometry} does not fit {shape}")
    return ArenaStruct.of(layout)
