"""Which paged attention runs on a GPU: a library's where one is there and works, else our own.

Back-ends are tried in the order of `CANDIDATES`: vllm_flash_attn (PyPI's, or the one inside vLLM), torch's paged varlen
attention, our CUDA kernels. Libraries are imported when they are tried, never with this module, and each must first
reproduce our reference on a small step: what a library accepts depends on its version, its build and the card.

Shapes: T tokens of the step, Q query heads, H kv heads, D head_dim, N blocks, B tokens a block.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from remora.kernels.attention_base import AttentionInputs, AttentionNeed, PagedAttention
from remora.kernels.attention_trial import largest_difference
from remora.kernels.batch import StepBatch
from remora.kernels.cuda.attention import (
    DeviceStep,
    attention_source,
    check_shape,
    check_tables,
    paged_attention,
    parts_scratch,
    upload_step,
    with_plan,
)
from remora.kernels.cuda.attention_plan import TILE_ROWS, plan_attention, plan_decode_graph
from remora.kernels.cuda.device import Device
from remora.kernels.cuda.place import block_major
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.platform.base.errors import KernelError

_log = logging.getLogger(__name__)

#: How far a library's bf16 result may be from the fp32 reference on the small step.
_TRIAL_TOLERANCE = 2.0**-6


Candidate = Callable[[AttentionNeed, Device], PagedAttention]


def _pages(layout: BlockLayout, data: torch.Tensor, layer: int, side: int) -> torch.Tensor:
    """K or V of one layer as kv_NBHD, a view: libraries take any strides as long as dims are side by side."""
    place, size = block_major(layout, layer), layout.value_bytes
    num_blocks = len(data) // layout.block_bytes
    return (
        data[: num_blocks * layout.block_bytes]
        .view(layout.torch_dtype)
        .as_strided(
            (num_blocks, layout.block_tokens, layout.num_kv_heads, layout.head_dim),
            (place.block_stride // size, layout.head_dim, place.k_head_stride // size, 1),
            (place.layer_offset + side * place.side_stride) // size,
        )
    )


def _check_library_shape(need: AttentionNeed, multiple_of_tokens: int) -> None:
    if need.batch_invariant:
        raise KernelError("it does not promise the same bits in any batch")
    if need.values != "bf16":
        raise KernelError(f"it does not take queries in {need.values}")
    if need.layout.precisions != ("bf16", "bf16"):
        raise KernelError(f"it does not take KV in {'/'.join(dict.fromkeys(need.layout.precisions))}")
    if need.layout.block_tokens % multiple_of_tokens:
        raise KernelError(f"its pages hold a multiple of {multiple_of_tokens} tokens, not {need.layout.block_tokens}")


class _LibraryAttention:
    """What the libraries' routines have in common: one varlen call over pages."""

    batch_invariant = False

    def __init__(self, name: str, need: AttentionNeed, call: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.name = name
        self._need = need
        self._call = call

    def begin(self, batch: StepBatch, data: Any) -> dict[str, Any]:
        """What the call takes besides q, k and v."""
        num_columns, num_sequences = check_tables(batch, self._need.layout, data), batch.num_sequences
        starts, lengths = batch.query_start_S[: num_sequences + 1], batch.context_len_S[:num_sequences]

        def on_device(array: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(array.copy()).to(data.device)

        return {
            "query_start": on_device(starts),
            "context_len": on_device(lengths),
            "block_table": on_device(batch.block_table_SB[:num_sequences, :num_columns]),
            "max_query": int(np.diff(starts).max()),
            "max_context": int(lengths.max()),
            "scale": self._need.scale,
        }

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (_pages(self._need.layout, inputs.data, inputs.layer, side) for side in (K_SIDE, V_SIDE))
        out, lse_QT = self._call(q=inputs.q_TQD, k=k, v=v, **inputs.step)
        return out, lse_QT.transpose(0, 1)


def _flash_call(function: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def call(**a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = function(
            q=a["q"],
            k=a["k"],
            v=a["v"],
            cu_seqlens_q=a["query_start"],
            seqused_k=a["context_len"],
            block_table=a["block_table"],
            max_seqlen_q=a["max_query"],
            max_seqlen_k=a["max_context"],
            softmax_scale=a["scale"],
            causal=True,
            return_softmax_lse=True,
        )[:2]
        return out, lse

    return call


def _vllm_flash_attn(need: AttentionNeed, device: Device) -> PagedAttention:
    _check_library_shape(need, 16)
    reasons = []
    for module_name in ("vllm_flash_attn", "vllm.vllm_flash_attn"):
        try:
            function = importlib.import_module(module_name).flash_attn_varlen_func
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            reasons.append(f"{module_name}: {error}")
            continue
        names = inspect.signature(function).parameters
        if "return_softmax_lse" not in names or "seqused_k" not in names:
            reasons.append(f"{module_name}: too old, it gives no log-sum-exp over pages")
            continue
        return _LibraryAttention(module_name, need, _flash_call(function))
    raise KernelError("; ".join(reasons))


def _torch_varlen(need: AttentionNeed, device: Device) -> PagedAttention:
    _check_library_shape(need, 1)
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
        attention = importlib.import_module("torch.nn.attention")
        if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
            raise KernelError(f"torch {torch.__version__} has no paged varlen attention")
        # torch's own FlashAttention 2 refuses pages; 3 and 4 are packages that have to be activated.
        if attention.current_flash_attention_impl() is None:
            _activate_first(attention)
    except (ImportError, AttributeError) as error:
        raise KernelError(f"torch {torch.__version__}: {error}") from None

    def call(**a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = varlen.varlen_attn(
            a["q"],
            a["k"],
            a["v"],
            a["query_start"],
            None,
            a["max_query"],
            a["max_context"],
            return_aux=varlen.AuxRequest(lse=True),
            scale=a["scale"],
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=a["context_len"],
            block_table=a["block_table"],
            num_splits=1,
        )
        return out, lse

    return _LibraryAttention("torch.varlen", need, call)


def _activate_first(attention: Any) -> None:
    reasons = []
    for name in sorted(attention.list_flash_attention_impls()):
        try:
            attention.activate_flash_attention_impl(name)
        except (ImportError, RuntimeError, ValueError, OSError) as error:
            reasons.append(f"{name}: {error}")
        else:
            return
    raise KernelError(f"no FlashAttention that takes pages ({'; '.join(reasons) or 'none registered'})")


class CudaAttention:
    """Our kernels (kernels/cuda): any batch, prompt cut and cascade give the same bits."""

    name = "remora.cuda"
    batch_invariant = True

    def __init__(self, need: AttentionNeed, device: Device) -> None:
        """Raises KernelError for a shape that is not served."""
        check_shape(need.layout, need.num_heads)
        self._need = need
        self._device = device
        for tile_rows in TILE_ROWS:
            device.prepare(attention_source(need.layout, need.values, tile_rows))
        #: Scratch of all graphs: they run one after the other.
        self._graph_parts: Any = None
        #: Query heads of a kv head.
        self.group = need.num_heads // need.layout.num_kv_heads

    def begin(self, batch: StepBatch, data: Any) -> DeviceStep:
        need, layout = self._need, self._need.layout
        plan = plan_attention(
            batch,
            group=self.group,
            num_kv_heads=layout.num_kv_heads,
            block_tokens=layout.block_tokens,
            num_processors=self._device.num_processors,
        )
        return upload_step(self._device, batch, plan, layout, data, need.num_heads)

    def begin_graph(self, positions_S: Any, block_table_SB: Any, max_context_len: int) -> DeviceStep:
        """A step of one row a sequence that may be repeated with other positions and tables in the same arrays."""
        plan = plan_decode_graph(num_sequences=len(positions_S), max_context_len=max_context_len, group=self.group)
        if self._graph_parts is None or len(self._graph_parts) < plan.num_parts:
            num_parts = 1 << (plan.num_parts - 1).bit_length()
            self._graph_parts = parts_scratch(self._device, num_parts, self._need.layout, self._need.num_heads)
        return with_plan(self._device, plan, positions_S, block_table_SB, self._graph_parts)

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        need, layout = self._need, self._need.layout
        q = inputs.q_TQD.contiguous()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        paged_attention(
            self._device,
            inputs.step,
            q_TQD=q,
            out_TQD=out,
            lse_TQ=lse,
            data=inputs.data,
            layout=layout,
            place=block_major(layout, inputs.layer),
            scale=need.scale,
        )
        return out, lse


#: By preference. Names are those of the log line and of `prefer`.
CANDIDATES: dict[str, Candidate] = {
    "vllm_flash_attn": _vllm_flash_attn,
    "torch_varlen": _torch_varlen,
    "cuda": CudaAttention,
}


def choose_attention(
    need: AttentionNeed, device: Device, *, torch_device: str = "cuda", prefer: str | None = None
) -> PagedAttention:
    """The first back-end that serves the need and passes its trial; `prefer` allows just one of CANDIDATES.

    Raises KernelError with every reason when none does.
    """
    names = list(CANDIDATES) if prefer is None else [prefer]
    reasons: list[str] = []
    for name in names:
        if name not in CANDIDATES:
            raise KernelError(f"no attention back-end {name!r}; there are {', '.join(CANDIDATES)}")
        try:
            backend = CANDIDATES[name](need, device)
            difference = largest_difference(backend, need, torch_device)
        except (KernelError, RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
            reasons.append(f"{name}: {' '.join(str(error).split())[:200]}")
            continue
        if not difference <= _TRIAL_TOLERANCE:
            reasons.append(f"{name}: its result is {difference:.3g} off the reference")
            continue
        passed_over = f" (passed over: {'; '.join(reasons)})" if reasons else ""
        _log.info("paged attention runs on %s%s", backend.name, passed_over)
        return backend
    raise KernelError(f"no paged attention for this model: {'; '.join(reasons)}")
