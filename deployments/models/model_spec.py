"""What a model is, read from its files before any weight is."""

from __future__ import annotations

from dataclasses import dataclass

from remora.kernels.base import DecoderShape
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision

#: Context where neither the configuration nor the model asks for less.
DEFAULT_CONTEXT_LEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model of the Llama family that the own decoder can run."""

    #: For people: "llama", "qwen3", ...
    architecture: str
    shape: DecoderShape
    #: Rope's inverse frequencies, head_dim / 2 of them.
    rope_inv_freq: tuple[float, ...]
    #: What rotates K, as text: part of the KV geometry.
    rope: str
    #: lm_head is the embedding.
    tied: bool
    #: Context in tokens that this replica serves.
    max_model_len: int

    def geometry(self, *, block_tokens: int, kv_precisions: tuple[Precision, Precision]) -> KVGeometry:
        """The KV geometry of a replica; precisions of K and of V."""
        group = LayerGroup(
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            k_precision=kv_precisions[0],
            v_precision=kv_precisions[1],
        )
        return KVGeometry(groups=(group,), block_tokens=block_tokens, rope=self.rope)


def served_context_len(model_len: int, wanted: int | None) -> int:
    """The model's own length, at most what was asked for, or 8192 when nothing was."""
    return min(model_len, wanted if wanted is not None else DEFAULT_CONTEXT_LEN)
