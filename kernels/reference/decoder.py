"""The decoder in plain torch: the fallback where the native library is missing, and the oracle of its tests.

Shapes: T tokens of the step, Q query heads, H kv heads, D head_dim, R rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.base import DecoderShape, KVMemory, Weights
from remora.kernels.batch import StepBatch
from remora.kernels.grouped import GroupedTensor
from remora.kernels.layout import BlockLayout, Layouts
from remora.kernels.reference.attention import paged_attention
from remora.kernels.reference.kv_view import KVView
from remora.kernels.reference.linear import make_linear
from remora.kernels.reference.norm import rms_norm
from remora.kernels.reference.rope import rope_tables, rotate
from remora.kernels.reference.store_kv import store_kv
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What every layer of one step needs."""

    cos_TD: torch.Tensor
    sin_TD: torch.Tensor
    block_T: torch.Tensor
    slot_T: torch.Tensor
    #: Rows whose K and V can be held, in all layers so far.
    fits_T: torch.Tensor
    #: Rows, blocks and context length of each sequence.
    sequences: list[tuple[slice, torch.Tensor, int]]


class TorchDecoder:
    """kernels.base.Decoder in torch. Reads and writes the arena through strided views; holds no KV of its own.

    Not batch-invariant: torch's products depend on the number of rows in the last bits.
    """

    def __init__(self, shape: DecoderShape, weights: Weights, geometry: KVGeometry, num_threads: int) -> None:
        """Raises KernelError when geometry or weights do not fit the shape."""
        self._shape = shape
        self._layouts = Layouts(geometry)
        self._num_threads = num_threads
        own = self._layouts.own
        fits = (own.num_layers, own.num_kv_heads, own.head_dim) == (
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
        )
        if not fits or shape.num_attention_heads % shape.num_kv_heads:
            raise KernelError(f"KV geometry {geometry} does not fit {shape}")
        self._scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale
        self._weights = weights
        self._inv_freq = self._tensor("rope_inv_freq", (shape.head_dim // 2,))
        self._embed = self._embedding() if shape.has_embedding else None
        self._head = self._final() if shape.has_head else None
        self._layers = [self._layer(index) for index in range(shape.num_layers)]
        del self._weights

    @property
    def batch_invariant(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return "torch-reference"

    def _weight(self, name: str, size: tuple[int, ...]) -> torch.Tensor | GroupedTensor:
        tensor = self._weights.get(name)
        if tensor is None:
            raise KernelError(f"weight {name} is missing")
        if tuple(tensor.shape) != size:
            raise KernelError(f"weight {name} has shape {tuple(tensor.shape)}, not {size}")
        return tensor

    def _tensor(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        tensor = self._weight(name, size)
        return tensor.to_fp32() if isinstance(tensor, GroupedTensor) else tensor.detach()

    def _linear(self, name: str, bias: str | None, num_out: int, num_in: int) -> Linear:
        bias_tensor = None if bias is None else self._tensor(bias, (num_out,))
        return make_linear(self._weight(name, (num_out, num_in)), bias_tensor, self._shape.weights)

    def _layer(self, index: int) -> _Layer:
        shape, prefix = self._shape, f"layers.{index}."
        q_size = shape.num_attention_heads * shape.head_dim
        qkv_size = q_size + 2 * shape.num_kv_heads * shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size

        def bias(name: str, present: bool) -> str | None:
            return prefix + name if present else None

        def head_norm(name: str) -> torch.Tensor | None:
            return self._tensor(prefix + name, (shape.head_dim,)) if shape.qk_norm else None

        return _Layer(
            input_norm=self._tensor(prefix + "input_norm", (hidden,)),
            post_norm=self._tensor(prefix + "post_norm", (hidden,)),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            qkv=self._linear(prefix + "qkv", bias("qkv_bias", shape.qkv_bias), qkv_size, hidden),
            o=self._linear(prefix + "o", bias("o_bias", shape.output_bias), hidden, q_size),
            gate_up=self._linear(prefix + "gate_up", bias("gate_up_bias", shape.mlp_bias), 2 * inner, hidden),
            down=self._linear(prefix + "down", bias("down_bias", shape.mlp_bias), hidden, inner),
        )

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raises KernelError for a geometry that differs from the model's in more than precision."""
        self._layouts.find(geometry)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        """Stores the step's K/V in `memory` and returns logits_RV, valid until the next call.

        Raises KernelError, before anything is written, for a block index outside the memory, a token outside the
        vocabulary or a geometry as in check_geometry.
        """
        return self.forward_stage(batch, memory, None)

    @torch.inference_mode()
    def forward_stage(
        self, batch: StepBatch, memory: KVMemory, hidden_TH: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """As `forward`, for a stage: kernels.base.StageDecoder."""
        layout = self._layouts.find(memory.geometry)
        # torch keeps the number of threads per calling thread, and engines run in a thread of their own.
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        num_tokens = batch.num_tokens
        hidden = self._begin(batch.token_ids_T[:num_tokens], hidden_TH)
        step = self._prepare(batch, layout, memory)
        kv = KVView(layout, memory.data)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.input_norm, self._shape.rms_norm_eps)
            hidden = hidden + layer.o(self._attend(index, layer, layer.qkv(normed), kv, step))
            normed = rms_norm(hidden, layer.post_norm, self._shape.rms_norm_eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(torch.nn.functional.silu(gate) * up)
        for index, (own_rows, _, _) in enumerate(step.sequences):
            batch.not_finite_S[index] = not bool(step.fits_T[own_rows].all())
        if self._head is not None:
            rows = torch.from_numpy(batch.logit_rows_R[: batch.num_logit_rows]).long()
            hidden = self._head(hidden[rows])
        result: NDArray[np.float32] = hidden.numpy()
        return result

    def _embedding(self) -> torch.Tensor:
        embed = self._tensor("embed", (self._shape.vocab_size, self._shape.hidden_size))
        return embed.to(torch.bfloat16) if self._shape.weights == "bf16" else embed

    def _final(self) -> Linear:
        """The last norm and the head."""
        shape = self._shape
        final_norm = self._tensor("final_norm", (shape.hidden_size,))
        name = "lm_head" if "lm_head" in self._weights else "embed"
        head = self._linear(name, None, shape.vocab_size, shape.hidden_size)
        return lambda hidden: head(rms_norm(hidden, final_norm, shape.rms_norm_eps))

    def _begin(self, token_ids_T: NDArray[np.int32], hidden_TH: NDArray[np.float32] | None) -> torch.Tensor:
        """The residual stream before the first layer."""
        shape = self._shape
        if (hidden_TH is None) != shape.has_embedding:
            raise KernelError("hidden states are for stages without an embedding, and only for those")
        if self._embed is None or hidden_TH is not None:
            if hidden_TH is None or hidden_TH.shape != (len(token_ids_T), shape.hidden_size):
                raise KernelError(f"hidden states do not fit {len(token_ids_T)} tokens of {shape.hidden_size} values")
            return torch.from_numpy(hidden_TH)
        token_ids = torch.from_numpy(token_ids_T).long()
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < shape.vocab_size:
            raise KernelError(f"a token id lies outside the vocabulary of {shape.vocab_size}")
        return self._embed[token_ids].to(torch.float32)

    def _prepare(self, batch: StepBatch, layout: BlockLayout, memory: KVMemory) -> _Step:
        block_tokens = layout.block_tokens
        positions = torch.from_numpy(batch.positions_T[: batch.num_tokens]).long()
        cos, sin = rope_tables(positions, self._inv_freq, self._shape.rope_attention_factor)
        block_T = torch.empty(batch.num_tokens, dtype=torch.long)
        sequences = []
        for row in range(batch.num_sequences):
            rows = slice(int(batch.query_start_S[row]), int(batch.query_start_S[row + 1]))
            context_len = int(batch.context_len_S[row])
            num_columns = -(-context_len // block_tokens)
            if num_columns > batch.block_table_SB.shape[1]:
                raise KernelError(f"{context_len} tokens need {num_columns} columns of the block table")
            columns = batch.block_table_SB[row, :num_columns]
            layout.check_blocks(memory.data, columns)
            blocks = torch.from_numpy(columns).long()
            block_T[rows] = blocks[positions[rows] // block_tokens]
            sequences.append((rows, blocks, context_len))
        return _Step(
            cos_TD=cos,
            sin_TD=sin,
            block_T=block_T,
            slot_T=positions % block_tokens,
            fits_T=torch.ones(batch.num_tokens, dtype=torch.bool),
            sequences=sequences,
        )

    def _attend(self, index: int, layer: _Layer, qkv: torch.Tensor, kv: KVView, step: _Step) -> torch.Tensor:
        shape = self._shape
        heads_THD = qkv.view(len(qkv), -1, shape.head_dim)
        first_k, first_v = shape.num_attention_heads, shape.num_attention_heads + shape.num_kv_heads
        q, k, v = heads_THD[:, :first_k], heads_THD[:, first_k:first_v], heads_THD[:, first_v:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, shape.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, shape.rms_norm_eps)
        q = rotate(q, step.cos_TD, step.sin_TD)
        k = rotate(k, step.cos_TD, step.sin_TD)
        step.fits_T.logical_and_(store_kv(kv, layer=index, k_THD=k, v_THD=v, block_T=step.block_T, slot_T=step.slot_T))
        out = torch.empty_like(q)
        for rows, blocks, context_len in step.sequences:
            out[rows], _ = paged_attention(
                kv, layer=index, q_TQD=q[rows], blocks=blocks, context_len=context_len, scale=self._scale
            )
        return out.reshape(len(qkv), -1)
