"""Any full-attention causal model of transformers as a Decoder: slower than the own one, with the same paged KV.

transformers computes everything but attention; a function registered with its AttentionInterface stores K and V of the
step through the block table and attends from the arena. Shapes: T tokens of the step, Q query heads, H kv heads,
D head_dim, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remora.deployments.models.refusals import refuse
from remora.kernels.base import KVMemory
from remora.kernels.batch import StepBatch
from remora.kernels.layout import BlockLayout, Layouts
from remora.kernels.reference.attention import paged_attention
from remora.kernels.reference.kv_view import KVView
from remora.kernels.reference.store_kv import store_kv
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError

ATTENTION_NAME = "remora_paged"
#: Arguments that change attention in ways that the paged function does not compute.
_FOREIGN_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "alibi")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """What one layer handed to attention: enough to derive the KV geometry and to refuse what is not served."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None
    #: Names of arguments that attention here does not compute.
    foreign: tuple[str, ...]
    is_causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    #: The arena, or None while a model is looked at: then attention is plain and only the calls matter.
    kv: KVView | None
    block_T: torch.Tensor
    slot_T: torch.Tensor
    #: Rows whose K and V can be held, in all layers so far.
    fits_T: torch.Tensor
    #: Rows, blocks and context length of each sequence.
    sequences: list[tuple[slice, torch.Tensor, int]]
    calls: list[LayerCall] = field(default_factory=list)


#: The step that the current thread computes; transformers offers no way to hand it through every architecture.
_STEP: ContextVar[_Step] = ContextVar("remora_step")


def _describe(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kwargs: Any) -> LayerCall:
    causal = kwargs.get("is_causal")
    return LayerCall(
        layer=int(getattr(module, "layer_idx", -1)),
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=k.shape[-1],
        value_dim=v.shape[-1],
        sliding_window=kwargs.get("sliding_window"),
        foreign=tuple(name for name in _FOREIGN_ARGUMENTS if kwargs.get(name) is not None),
        is_causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
    )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [1, Q, T, D], key and value [1, H, T, D] → [1, T, Q, D]."""
    step = _STEP.get()
    call = _describe(module, query, key, value, kwargs)
    step.calls.append(call)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q_TQD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    if step.kv is None:
        groups = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        plain = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        return plain.transpose(1, 2).contiguous(), None
    fits_T = store_kv(step.kv, layer=call.layer, k_THD=k_THD, v_THD=v_THD, block_T=step.block_T, slot_T=step.slot_T)
    step.fits_T.logical_and_(fits_T)
    out = torch.empty(q_TQD.shape, dtype=query.dtype)
    for rows, blocks, context_len in step.sequences:
        attended, _ = paged_attention(
            step.kv, layer=call.layer, q_TQD=q_TQD[rows], blocks=blocks, context_len=context_len, scale=scale
        )
        out[rows] = attended.to(query.dtype)
    return out[None], None


def register_attention() -> None:
    """Makes `attn_implementation=ATTENTION_NAME` known to transformers; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


def trace_attention(name: str, model: Any) -> LayerCall:
    """Runs one token and returns what every layer's attention looks like, with the smallest window of all.

    Raises ModelError by name when the model's attention does not come through the interface exactly once a layer, or
    asks for what is not served.
    """
    architecture = str(model.config.model_type)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        refuse(name, architecture, "its forward takes no position_ids, so tokens cannot be placed in a sequence.")
    one = torch.zeros(1, dtype=torch.long)
    step = _Step(kv=None, block_T=one, slot_T=one, fits_T=one == 0, sequences=[])
    token = _STEP.set(step)
    try:
        with torch.inference_mode():
            model(input_ids=one[None], position_ids=one[None], use_cache=False)
    finally:
        _STEP.reset(token)
    num_layers = int(getattr(model.config, "num_hidden_layers", 0))
    if not step.calls:
        refuse(name, architecture, "its attention does not go through transformers' attention interface.")
    if sorted(call.layer for call in step.calls) != list(range(num_layers)):
        refuse(
            name, architecture, f"not every one of its {num_layers} layers is one full attention (hybrid or shared)."
        )
    first = step.calls[0]
    for call in step.calls:
        if call.value_dim != call.head_dim:
            refuse(name, architecture, f"its keys have {call.head_dim} dimensions and its values {call.value_dim}.")
        if (call.num_heads, call.num_kv_heads, call.head_dim) != (first.num_heads, first.num_kv_heads, first.head_dim):
            refuse(name, architecture, "its layers differ in heads or head size.")
        if call.foreign:
            refuse(name, architecture, f"its attention uses {call.foreign[0]!r}, which is not served.")
        if not call.is_causal:
            refuse(name, architecture, "its attention is not causal.")
    windows = [call.sliding_window for call in step.calls if call.sliding_window is not None]
    return replace(first, sliding_window=min(windows, default=None))


class TransformersDecoder:
    """kernels.base.Decoder over a transformers model in evaluation mode. Holds no KV. Not batch-invariant."""

    def __init__(self, model: Any, geometry: KVGeometry, num_threads: int) -> None:
        """`model`: loaded with attn_implementation=ATTENTION_NAME and checked by trace_attention."""
        self._model = model
        self._layouts = Layouts(geometry)
        self._num_threads = num_threads
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def batch_invariant(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return f"transformers-{self._model.config.model_type}"

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raises KernelError for a geometry that differs from the model's in more than precision."""
        self._layouts.find(geometry)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        """Stores the step's K/V in `memory` and returns logits_RV, valid until the next call.

        Raises KernelError, before anything is written, for a block index outside the memory, a token outside the
        vocabulary or a geometry as in check_geometry.
        """
        layout = self._layouts.find(memory.geometry)
        # torch keeps the number of threads per calling thread, and engines run in a thread of their own.
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        num_tokens = batch.num_tokens
        token_ids = torch.from_numpy(batch.token_ids_T[:num_tokens]).long()
        if num_tokens and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self._vocab_size:
            raise KernelError(f"a token id lies outside the vocabulary of {self._vocab_size}")
        positions = torch.from_numpy(batch.positions_T[:num_tokens]).long()
        rows = torch.from_numpy(batch.logit_rows_R[: batch.num_logit_rows]).long()
        options: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_rows else {}
        step = self._prepare(batch, layout, memory, positions)
        token = _STEP.set(step)
        try:
            output = self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **options)
        finally:
            _STEP.reset(token)
        for index, (own_rows, _, _) in enumerate(step.sequences):
            batch.not_finite_S[index] = not bool(step.fits_T[own_rows].all())
        logits = output.logits[0] if self._keeps_rows else output.logits[0, rows]
        result: NDArray[np.float32] = logits.to(torch.float32).contiguous().numpy()
        return result

    def _prepare(self, batch: StepBatch, layout: BlockLayout, memory: KVMemory, positions: torch.Tensor) -> _Step:
        block_tokens = layout.block_tokens
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
        kv = KVView(layout, memory.data)
        return _Step(
            kv=kv,
            block_T=block_T,
            slot_T=positions % block_tokens,
            fits_T=torch.ones(batch.num_tokens, dtype=torch.bool),
            sequences=sequences,
        )
