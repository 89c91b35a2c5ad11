"""What a decoder is and what it may rely on. Back-ends: kernels/native (C++) and kernels/reference (torch).

Shapes: T tokens of the step, H hidden size, R rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch
from remora.namespaces.geometry import KVGeometry

if TYPE_CHECKING:
    import torch

    from remora.kernels.grouped import GroupedTensor

WeightPrecision = Literal["fp32", "bf16", "int8", "int4"]
#: Sampling weights are summed in pieces of this length, then one piece is searched. As in native/src/rows.h.
WEIGHT_PIECE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A decoder of the Llama family, as numbers. Field names follow Hugging Face's configs."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    #: RMS norm over head_dim of q and k before rope (Qwen3).
    qk_norm: bool = False
    #: Bias on q, k and v (Qwen2) and on the output projection.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    #: Multiplies q·k; None means head_dim ** -0.5.
    attention_scale: float | None = None
    #: Multiplies cos and sin (yarn, longrope); 1.0 for plain rope.
    rope_attention_factor: float = 1.0
    weights: WeightPrecision = "bf16"
    #: A stage of a pipeline has a part of the layers: the first also the embedding, the last also final norm and head.
    has_embedding: bool = True
    has_head: bool = True


#: Canonical weight names → tensors, [out, in] as in Hugging Face:
#:   embed [V, H] · lm_head [V, H] (absent when tied) · final_norm [H] · rope_inv_freq [head_dim / 2] fp32
#:   layers.{i}.input_norm [H] · .post_norm [H] · .qkv [(q + 2 kv) * head_dim, H] rows q, then k, then v
#:   .qkv_bias · .q_norm [head_dim] · .k_norm [head_dim] · .o [H, q * head_dim] · .o_bias
#:   .gate_up [2 * I, H] rows gate, then up · .gate_up_bias · .down [H, I] · .down_bias
#: Rope is Hugging Face's half-rotation (rotate_half); loaders permute GGUF's interleaved rows back.
#: Matrices of an int8 or int4 model, but for embed, may be grouped tensors of either; the decoder quantises others.
Weights = Mapping[str, "torch.Tensor | GroupedTensor"]


class KVMemory(Protocol):
    """A mapped arena as one model sees it: block i is at byte i * geometry.block_bytes of `data`."""

    @property
    def data(self) -> NDArray[np.uint8]: ...

    @property
    def geometry(self) -> KVGeometry: ...


class Decoder(Protocol):
    """Runs steps. Not thread-safe: one caller at a time.

    Own kernels reduce in an order fixed by position, so a row's result does not depend on its neighbours, on how its
    prompt was cut into chunks, or on cache hits; `batch_invariant` says whether that holds for this back-end.
    """

    @property
    def batch_invariant(self) -> bool: ...

    @property
    def name(self) -> str:
        """For the log and /v1/replicas, e.g. "native-amx-bf16" or "torch-reference"."""
        ...

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raises KernelError unless steps may have their KV in this geometry. Of the decoder's own geometry all
        precisions are served that a back-end has."""
        ...

    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        """Stores the step's K/V in `memory` and returns logits_RV, valid until the next call.

        Steps may differ in the precision of their memory. Raises KernelError for a block index outside the memory or a
        geometry as in check_geometry.
        """
        ...


class StageDecoder(Decoder, Protocol):
    """A decoder that can also be one stage of a pipeline. The stages of a model one after the other give the same bits
    as the whole model."""

    def forward_stage(
        self, batch: StepBatch, memory: KVMemory, hidden_TH: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """As `forward`, from what the stage before has given (None where tokens are embedded, and only there): the
        residual stream hidden_TH, or, with a head, logits_RV; valid until the next call."""
        ...


def check_decoder_health(decoder: Decoder) -> None:
    """Raises KernelError when the decoder can compute nothing more in this process, where it can tell."""
    check = getattr(decoder, "check_health", None)
    if check is not None:
        check()
