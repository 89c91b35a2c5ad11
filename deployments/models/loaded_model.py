"""A model in memory, ready to serve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remora.deployments.models.kv_identity import KVIdentity
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.kernels.base import Decoder, DecoderShape
from remora.namespaces.geometry import KVGeometry, KVPrecision


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory. The decoder belongs to one engine; the tokenizer may be shared."""

    name: str
    #: None for a model that runs through transformers.
    shape: DecoderShape | None
    geometry: KVGeometry
    #: What makes KV content interchangeable (namespaces/hashing.py).
    fingerprint: bytes
    #: Contents of the weights, and what else decides what the model computes.
    weights_id: str
    decoder: Decoder
    tokenizer: ChatTokenizer
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    #: Columns of the logits.
    vocab_size: int
    #: Memory of the weights.
    weights_bytes: int
    #: Whether other processes of the node use, or can come to use, the same memory.
    shares_weights: bool = False
    #: Memory of the device that its steps take besides; 0: the host's, which is not set aside.
    workspace_bytes: int = 0
    #: Frequencies of the rotation of K; None where they are not known (transformers).
    rope_inv_freq: NDArray[np.float32] | None = None

    @property
    def reserved_bytes(self) -> int:
        """What a pool sets aside for it."""
        return self.weights_bytes + self.workspace_bytes

    @property
    def kv_identity(self) -> KVIdentity:
        return KVIdentity(
            model=self.name,
            geometry=self.geometry,
            weights_id=self.weights_id,
            tokenizer_id=self.tokenizer.tokenizer_id,
        )

    def in_precision(self, kv_precision: KVPrecision) -> tuple[KVGeometry, bytes]:
        """Geometry and fingerprint of its KV in another precision. The weights are the same: one decoder serves all."""
        return self.geometry.with_precision(kv_precision), self.kv_identity.fingerprint(kv_precision)
