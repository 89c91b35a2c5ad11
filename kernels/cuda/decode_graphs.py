"""Steps in which every sequence decodes one token, captured once and replayed: launching them kernel by kernel takes
longer than a small model computes.

A graph is of a number of rows and a length of contexts, both rounded up. Rows that are not there embed token 0 at
position 0 and store nothing.

Shapes: T rows of a graph, C columns of its table.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.attention_backends import CudaAttention
from remora.kernels.batch import StepBatch
from remora.kernels.cuda.attention import check_tables
from remora.kernels.cuda.attention_plan import CHUNK_TOKENS, MAX_PARTS, prefix_groups
from remora.kernels.cuda.runtime import Captured, Runtime
from remora.kernels.cuda.step import Arena, DeviceRows
from remora.kernels.step_check import StepRows
from remora.namespaces.geometry import KVGeometry

_log = logging.getLogger(__name__)

#: Captured steps that are kept.
_MAX_GRAPHS = 24
_MIN_CONTEXT_LEN = 2 * CHUNK_TOKENS
#: A step of a kind is captured when it comes for this time.
_CAPTURED_AT = 2


class _Key(NamedTuple):
    geometry: KVGeometry
    arena_address: int
    num_rows: int
    context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What a graph reads of a step."""

    rows: DeviceRows
    #: Token ids, positions, blocks and slots, each [T], then tables [T, C]: on the device, and what is copied there.
    device_ints: torch.Tensor
    host_ints: NDArray[np.int32]


class _Graph(NamedTuple):
    inputs: _Inputs
    captured: Captured


class DecodeGraphs:
    """Owns the captured steps of one decoder."""

    def __init__(
        self, runtime: Runtime, compute: Callable[[DeviceRows], torch.Tensor], hidden_size: int | None
    ) -> None:
        """`compute` is what is captured; `hidden_size` is given where it begins with hidden states."""
        self._runtime = runtime
        self._compute = compute
        self._hidden_size = hidden_size
        self._num_seen: dict[_Key, int] = {}
        self._graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        self._output: torch.Tensor | None = None
        self._is_given_up = False

    def run(
        self, batch: StepBatch, rows: StepRows, arena: Arena, hidden_TH: NDArray[np.float32] | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the step computes, and its marks; None for a step that is better launched.

        Raises KernelError, before anything is queued, for a block outside the arena.
        """
        key = None if self._is_given_up else self._key(batch, arena)
        if key is None:
            return None
        graph = self._graphs.get(key)
        if graph is None:
            self._num_seen[key] = self._num_seen.get(key, 0) + 1
            if self._num_seen[key] < _CAPTURED_AT:
                return None
        check_tables(batch, arena.layout, arena.data)
        if graph is None:
            graph = self._capture(key, arena, batch, rows, hidden_TH)
            if graph is None:
                return None
        else:
            self._graphs.move_to_end(key)
            self._fill(graph.inputs, batch, rows, hidden_TH)
        graph.captured.replay()
        return graph.captured.result[: batch.num_tokens], graph.inputs.rows.not_finite_S[: batch.num_sequences]

    def _key(self, batch: StepBatch, arena: Arena) -> _Key | None:
        num_rows, layout = batch.num_tokens, arena.layout
        if batch.num_sequences != num_rows or batch.num_logit_rows != num_rows:
            return None
        if not isinstance(arena.attention, CudaAttention):
            return None
        # A beginning that is read once for all is worth more than fewer launches.
        if prefix_groups(batch, arena.attention.group, layout.block_tokens):
            return None
        padded = 1 << (num_rows - 1).bit_length() if num_rows <= 8 else -(-num_rows // 8) * 8
        longest = max(int(batch.context_len_S[:num_rows].max()), _MIN_CONTEXT_LEN)
        context_len = min(1 << (longest - 1).bit_length(), batch.block_table_SB.shape[1] * layout.block_tokens)
        context_len = max(context_len, longest)
        if padded * (context_len // CHUNK_TOKENS + 1) > MAX_PARTS:
            return None
        return _Key(layout.geometry, arena.data.data_ptr(), padded, context_len)

    def _capture(
        self, key: _Key, arena: Arena, batch: StepBatch, rows: StepRows, hidden_TH: NDArray[np.float32] | None
    ) -> _Graph | None:
        inputs = self._make_inputs(key, arena)
        self._fill(inputs, batch, rows, hidden_TH)
        # Compiles, loads and allocates what a capture must not; stores what the replay then stores again.
        output = self._output_like(self._compute(inputs.rows))
        try:
            captured = self._runtime.capture(lambda: output.copy_(self._compute(inputs.rows)))
        except RuntimeError as error:  # torch's
            _log.warning("steps are launched kernel by kernel from now on: they cannot be captured: %s", error)
            self._is_given_up = True
            self._graphs.clear()
            return None
        graph = self._graphs[key] = _Graph(inputs, captured)
        while len(self._graphs) > _MAX_GRAPHS:
            oldest, _ = self._graphs.popitem(last=False)
            self._num_seen[oldest] = 0
        return graph

    def _make_inputs(self, key: _Key, arena: Arena) -> _Inputs:
        runtime, count = self._runtime, key.num_rows
        assert isinstance(arena.attention, CudaAttention), "only our kernels are captured"
        num_columns = -(-key.context_len // arena.layout.block_tokens)
        device_ints = runtime.empty((count * (4 + num_columns),), np.int32)
        token_ids_T, positions_T, block_T, slot_T, tables = device_ints.split([*[count] * 4, count * num_columns])
        order_T = runtime.upload(np.arange(count, dtype=np.int32))
        rows = DeviceRows(
            arena=arena,
            token_ids_T=token_ids_T,
            hidden_TH=None if self._hidden_size is None else runtime.empty((count, self._hidden_size), np.float32),
            positions_T=positions_T,
            block_T=block_T,
            slot_T=slot_T,
            sequence_T=order_T,
            logit_rows_R=order_T,
            not_finite_S=runtime.empty((count,), np.uint8),
            attention_step=arena.attention.begin_graph(positions_T, tables.view(count, num_columns), key.context_len),
        )
        return _Inputs(rows=rows, device_ints=device_ints, host_ints=runtime.staging(len(device_ints)))

    def _output_like(self, result: torch.Tensor) -> torch.Tensor:
        """Where graphs leave what they compute: the same place for all, as it is read before the next one runs."""
        if self._output is None or len(self._output) < len(result):
            num_rows = 1 << (len(result) - 1).bit_length()
            self._output = self._runtime.empty((num_rows, result.shape[1]), np.float32)
        return self._output[: len(result)]

    def _fill(self, inputs: _Inputs, batch: StepBatch, rows: StepRows, hidden_TH: NDArray[np.float32] | None) -> None:
        ints, num_rows, count = inputs.host_ints, batch.num_tokens, len(inputs.rows.token_ids_T)
        tables_TC = ints[4 * count :].reshape(count, -1)
        num_columns = min(tables_TC.shape[1], batch.block_table_SB.shape[1])
        ints[:] = 0
        for index, values in enumerate((batch.token_ids_T, batch.positions_T, rows.block_T, rows.slot_T)):
            ints[index * count : index * count + num_rows] = values[:num_rows]
        ints[2 * count + num_rows : 3 * count] = -1
        tables_TC[:num_rows, :num_columns] = batch.block_table_SB[:num_rows, :num_columns]
        self._runtime.refill(inputs.device_ints, ints)
        given_TH = inputs.rows.hidden_TH
        if given_TH is not None:
            assert hidden_TH is not None, "hidden states belong to a stage without an embedding"
            given_TH[:num_rows].copy_(torch.from_numpy(hidden_TH))
            given_TH[num_rows:].zero_()
