"""What a model's KV is, as far as its files tell: known without its weights in memory."""

from __future__ import annotations

from dataclasses import dataclass

from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.hashing import kv_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class KVIdentity:
    """Equal identities mean that KV of equal tokens is interchangeable."""

    #: In the configuration; no part of what is compared.
    model: str
    #: In the model's own KV precision.
    geometry: KVGeometry
    #: Contents of the weights, and what else decides what the model computes.
    weights_id: str
    tokenizer_id: str

    def fingerprint(self, kv_precision: KVPrecision) -> bytes:
        """Of its KV in this precision (namespaces/hashing.py)."""
        return kv_fingerprint(self.geometry.with_precision(kv_precision), self.weights_id, self.tokenizer_id)
