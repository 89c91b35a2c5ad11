"""The decoder on a GPU: our kernels for norms, rope, storage and attention, torch (cuBLAS) for linear layers.

The residual stream is fp32; activations have the precision of the weights. Shapes: T tokens of the step, Q query heads,
H hidden size, D head_dim, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear, silu

from remora.kernels.attention_backends import choose_attention
from remora.kernels.attention_base import AttentionInputs, AttentionNeed, PagedAttention
from remora.kernels.base import DecoderShape, KVMemory, Weights
from remora.kernels.batch import StepBatch
from remora.kernels.cuda.decode_graphs import DecodeGraphs
from remora.kernels.cuda.mover import CudaMover
from remora.kernels.cuda.operations import rms_norm, store_kv, store_source
from remora.kernels.cuda.place import block_major
from remora.kernels.cuda.runtime import Runtime
from remora.kernels.cuda.step import Arena, DeviceRows, upload_rows
from remora.kernels.cuda.weights import load_weights, matrix_dtype
from remora.kernels.layout import Layouts
from remora.kernels.step_check import check_step
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError


class CudaDecoder:
    """kernels.base.StageDecoder on a runtime's device; memories must lie on it. Holds no KV.

    Not batch-invariant: cuBLAS promises the same bits for the same number of rows only.
    """

    batch_invariant = False

    def __init__(
        self,
        shape: DecoderShape,
        weights: Weights,
        geometry: KVGeometry,
        runtime: Runtime,
        *,
        attention: str | None = None,
    ) -> None:
        """`attention` allows just one of attention_backends.CANDIDATES.

        Raises KernelError when geometry or weights do not fit the shape, or the shape is not served.
        """
        self._shape, self._runtime, self._layouts = shape, runtime, Layouts(geometry)
        own = self._layouts.own
        if (own.num_layers, own.num_kv_heads, own.head_dim) != (shape.num_layers, shape.num_kv_heads, shape.head_dim):
            raise KernelError(f"KV geometry {geometry} does not fit {shape}")
        self._dtype = matrix_dtype(shape)
        self._scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale
        self._prefer = attention
        self._failure = ""
        self._attentions: dict[KVGeometry, PagedAttention] = {}
        with runtime.turn():
            self._attention_of(geometry)
            self._weights = load_weights(runtime, shape, weights)
        self._graphs = DecodeGraphs(runtime, self._compute, None if shape.has_embedding else shape.hidden_size)

    @property
    def name(self) -> str:
        attention = self._attentions[self._layouts.own.geometry].name
        return f"cuda-{self._shape.weights} on {self._runtime.name}, attention {attention}"

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self._weights.values()}.values())

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raises KernelError for a geometry that differs from the decoder's in more than precision or is not served."""
        with self._runtime.turn():
            self._attention_of(geometry)

    def mover(self, memory: KVMemory, rope_inv_freq: NDArray[np.float32] | None) -> CudaMover:
        """For kernels.mover.mover_of."""
        return CudaMover(self._runtime, memory, rope_inv_freq)

    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        """Stores the step's K/V in `memory` and returns logits_RV, valid until the next call.

        Raises KernelError, before anything is written, for a block index outside the memory, a token outside the
        vocabulary or a geometry as in check_geometry. Marks sequences in `batch.not_finite_S`.
        """
        return self.forward_stage(batch, memory, None)

    @torch.inference_mode()
    def forward_stage(
        self, batch: StepBatch, memory: KVMemory, hidden_TH: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """As `forward`, for a stage: kernels.base.StageDecoder."""
        shape, runtime = self._shape, self._runtime
        layout = self._layouts.find(memory.geometry)
        vocab_size = shape.vocab_size if shape.has_embedding else None
        rows = check_step(batch, block_tokens=layout.block_tokens, vocab_size=vocab_size)
        if (hidden_TH is None) != shape.has_embedding:
            raise KernelError("hidden states are for stages without an embedding, and only for those")
        if hidden_TH is not None and hidden_TH.shape != (batch.num_tokens, shape.hidden_size):
            raise KernelError(f"hidden states do not fit {batch.num_tokens} tokens of {shape.hidden_size} values")
        try:
            with runtime.turn():
                arena = Arena(
                    data=runtime.tensor(memory.data), layout=layout, attention=self._attention_of(memory.geometry)
                )
                done = self._graphs.run(batch, rows, arena, hidden_TH)
                if done is None:
                    device_rows = upload_rows(runtime, batch, rows, arena, hidden_TH)
                    done = self._compute(device_rows), device_rows.not_finite_S
                result, marks_S = done
                values: NDArray[np.float32] = runtime.download(result)
                batch.not_finite_S[: batch.num_sequences] = runtime.download(marks_S)
        except RuntimeError as error:  # torch's and CuPy's
            self._failure = runtime.failure()
            raise KernelError(f"a step of {batch.num_tokens} tokens failed on {runtime.name}: {error}") from error
        return values

    def check_health(self) -> None:
        """Raises KernelError when nothing more can be computed in this process."""
        if self._failure:
            raise KernelError(f"{self._runtime.name} is lost to this process: {self._failure}")

    def _attention_of(self, geometry: KVGeometry) -> PagedAttention:
        attention = self._attentions.get(geometry)
        if attention is None:
            layout = self._layouts.find(geometry)
            need = AttentionNeed(
                layout=layout,
                num_heads=self._shape.num_attention_heads,
                scale=self._scale,
                values="fp32" if self._dtype == torch.float32 else "bf16",
            )
            self._runtime.prepare(store_source(layout, need.values))
            attention = self._attentions[geometry] = choose_attention(
                need, self._runtime, torch_device=str(self._runtime.torch_device), prefer=self._prefer
            )
        return attention

    def _compute(self, rows: DeviceRows) -> torch.Tensor:
        """Queues all layers: logits_RV, or hidden_TH of a stage without a head, in fp32. May be captured."""
        shape, weights = self._shape, self._weights
        rows.not_finite_S.zero_()
        if rows.hidden_TH is not None:
            residual_TH = rows.hidden_TH.clone()
        else:
            residual_TH = weights["embed"].index_select(0, rows.token_ids_T).to(torch.float32)
        x_TH = torch.zeros(residual_TH.shape, dtype=self._dtype, device=residual_TH.device)
        for layer in range(shape.num_layers):
            prefix = f"layers.{layer}."
            attended_TH = self._attend(layer, self._norm(x_TH, prefix + "input_norm", residual_TH), rows)
            x_TH = linear(attended_TH, weights[prefix + "o"], weights.get(prefix + "o_bias"))
            normed_TH = self._norm(x_TH, prefix + "post_norm", residual_TH)
            both = linear(normed_TH, weights[prefix + "gate_up"], weights.get(prefix + "gate_up_bias"))
            gate, up = both.chunk(2, dim=-1)
            x_TH = linear(silu(gate) * up, weights[prefix + "down"], weights.get(prefix + "down_bias"))
        if not shape.has_head:
            return residual_TH + x_TH
        if not len(rows.logit_rows_R):
            return residual_TH.new_zeros((0, shape.vocab_size))
        x_RH, residual_RH = (each.index_select(0, rows.logit_rows_R) for each in (x_TH, residual_TH))
        return linear(self._norm(x_RH, "final_norm", residual_RH), weights["lm_head"]).to(torch.float32)

    def _norm(self, x_TH: torch.Tensor, name: str, residual_TH: torch.Tensor) -> torch.Tensor:
        """x is added to the residual in place; their norm."""
        normed_TH = torch.empty_like(x_TH)
        rms_norm(
            self._runtime,
            x_TI=x_TH,
            weight_I=self._weights[name],
            eps=self._shape.rms_norm_eps,
            out_TI=normed_TH,
            residual_TI=residual_TH,
        )
        return normed_TH

    def _attend(self, layer: int, normed_TH: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
        shape, weights, arena, prefix = self._shape, self._weights, rows.arena, f"layers.{layer}."
        qkv = linear(normed_TH, weights[prefix + "qkv"], weights.get(prefix + "qkv_bias"))
        num_tokens = len(qkv)
        q_TQD = qkv.new_empty((num_tokens, shape.num_attention_heads, shape.head_dim))
        store_kv(
            self._runtime,
            qkv=qkv.view(num_tokens, -1, shape.head_dim),
            q_TQD=q_TQD,
            positions_T=rows.positions_T,
            block_T=rows.block_T,
            slot_T=rows.slot_T,
            sequence_T=rows.sequence_T,
            not_finite_S=rows.not_finite_S,
            inv_freq=weights["rope_inv_freq"],
            rope_factor=shape.rope_attention_factor,
            q_norm=weights.get(prefix + "q_norm"),
            k_norm=weights.get(prefix + "k_norm"),
            eps=shape.rms_norm_eps,
            data=arena.data,
            layout=arena.layout,
            place=block_major(arena.layout, layer),
        )
        inputs = AttentionInputs(step=rows.attention_step, layer=layer, q_TQD=q_TQD, data=arena.data)
        out_TQD, _ = arena.attention.attend(inputs)
        return out_TQD.reshape(num_tokens, -1)
