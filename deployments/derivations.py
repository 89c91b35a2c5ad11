"""KV of other fingerprints that sessions may bring into a namespace, because its model can use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from remora.deployments.models.kv_identity import KVIdentity
from remora.namespaces.geometry import KVGeometry, KVPrecision, Precision
from remora.namespaces.hashing import Derivation

#: What may be taken over, and the geometry that it has where it comes from.
Derivations = Mapping[Derivation, KVGeometry]


def derivations_of(own: KVIdentity, others: Sequence[KVIdentity], kv_precision: KVPrecision) -> Derivations:
    """Into KV of `own` in this precision: that of the others in the same one, as it is; and its own of any other
    precision, re-encoded. Of `others` the shape and the tokenizer must be those of `own`."""
    geometry = own.geometry.with_precision(kv_precision)
    adopted = {
        Derivation(kind="adopted", fingerprint=other.fingerprint(kv_precision)): geometry
        for other in others
        if other.fingerprint(kv_precision) != own.fingerprint(kv_precision)
    }
    words: tuple[Precision, ...] = get_args(Precision)
    pairs: list[KVPrecision] = [(k, v) for k in words for v in words if (k, v) != kv_precision]
    converted = {
        Derivation(kind="converted", fingerprint=own.fingerprint(each)): own.geometry.with_precision(each)
        for each in pairs
    }
    return {**adopted, **converted}
