"""What a router must know of a model to turn text into a request: said by the replica that runs it."""

from __future__ import annotations

import msgspec

from remora.namespaces.hashing import Derivation
from remora.platform.base.ids import ModelId, NamespaceId, PoolId, ReplicaId


class NamespaceCard(msgspec.Struct, frozen=True, kw_only=True):
    """What depends on the KV precision that new requests of a namespace get."""

    #: KV fingerprint: root of the block hashes that the router computes (namespaces/hashing.py).
    fingerprint: bytes
    block_bytes: int
    #: KV of other fingerprints that sessions may bring into it.
    takes: tuple[Derivation, ...] = ()


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's answer to `describe`. Replicas of one model and revision give equal cards but for their ids."""

    replica_id: ReplicaId
    model_id: ModelId
    pool_id: PoolId
    #: Name of its actor: where replicas of other pools ask for blocks. "": nowhere.
    pool_actor_name: str = ""
    #: In the model's own KV precision.
    fingerprint: bytes
    block_tokens: int
    block_bytes: int
    #: Context in tokens, prompt and output together.
    max_model_len: int
    #: Token ids are valid in [0, vocab_size).
    vocab_size: int
    max_num_seqs: int
    #: Name of the decoder back-end, for people.
    decoder: str
    weights: str
    #: Memory of the weights, and whether it is one copy for all replicas of the node that use the same.
    weights_bytes: int = 0
    shares_weights: bool = False
    pid: int
    #: Seconds from the start of its process until it served, by what was done in them.
    start_s: dict[str, float] = {}
    #: Each namespace may have a precision of its own.
    namespaces: dict[NamespaceId, NamespaceCard] = {}
    #: Changes with the above: feed messages say which is the present one.
    card_no: int = 0

    def of(self, namespace_id: NamespaceId) -> NamespaceCard:
        """What the namespace has; the model's own where nothing else is said."""
        own = self.namespaces.get(namespace_id)
        return own or NamespaceCard(fingerprint=self.fingerprint, block_bytes=self.block_bytes)
