"""Names of content: equal hashes mean equal KV, in every process, tier and node.

    root   = H(fingerprint, sharing domain, salt)              typed and length-prefixed, so fields cannot run together
    hash_0 = H(key=root, tokens of block 0)
    hash_i = H(key=hash_{i-1}, tokens of block i)
    hash_i = H(key=E(key=hash_{i-1}, edit record), tokens)     when an edit touched block i first (namespaces/edits.py),
                                                               or KV from there on was taken over from another chain
    hash_i = C(key=hash_{i-1}, source's hash and formats)      KV that was converted from another precision
    hash_i = F(key=plain hash_i, last converted hash)          computed behind converted KV (namespaces/kept_chains.py)

H is blake2b with a 16-byte digest, keyed by the parent: a collision between two chains is a collision of blake2b, not
something a prompt can be built for (a weak block hash has been a security hole elsewhere: GHSA-rm76-4mrf-v9r8).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import InvalidRequest
from remora.platform.base.ids import BlockHash, NamespaceId

HASH_BYTES = 16
_CHAIN = b"remora-block-v1"
_ROOT = b"remora-root-v1"
_EDIT = b"remora-edit-v1"
_CONVERTED = b"remora-convert1"
_FOLLOWING = b"remora-follow-v1"
_FINGERPRINT = b"remora-model-v2"
_DERIVED = b"remora-derived-1"

#: "converted": re-encoded from another precision. "adopted": computed by another model, and used as it is.
DerivedKind = Literal["converted", "adopted"]


class Derivation(msgspec.Struct, frozen=True, kw_only=True):
    """How KV was made that lies in a chain of another fingerprint than it was computed under. It is not what would have
    been computed there, so that it, and all that is computed behind it, is named behind this record."""

    kind: DerivedKind
    #: Under which it was computed.
    fingerprint: bytes

    @property
    def digest(self) -> bytes:
        """For `edited_parent` and `chain_hashes`."""
        return blake2b(_encode_fields(self.kind, self.fingerprint), digest_size=HASH_BYTES, person=_DERIVED).digest()


def _encode_fields(*fields: str | bytes) -> bytes:
    """Type byte, 8-byte length, content, for each field: no two different lists encode to the same bytes."""
    parts: list[bytes] = []
    for field in fields:
        raw = field.encode() if isinstance(field, str) else field
        parts.append(b"s" if isinstance(field, str) else b"b")
        parts.append(struct.pack("<Q", len(raw)))
        parts.append(raw)
    return b"".join(parts)


def kv_fingerprint(geometry: KVGeometry, weights_id: str, tokenizer_id: str, adapter: bytes = b"") -> bytes:
    """32 bytes that are equal exactly when KV of equal tokens is interchangeable, in shape and in content."""
    fields = _encode_fields(msgspec.json.encode(geometry), weights_id, tokenizer_id, adapter)
    return blake2b(fields, digest_size=32, person=_FINGERPRINT).digest()


def sharing_domain(namespace_id: NamespaceId, tenant: str, share_group: str) -> str:
    """Who may share blocks: namespaces of one tenant with the same non-empty group; else the namespace alone."""
    if share_group:
        return f"group:{len(tenant)}:{tenant}:{share_group}"
    return f"namespace:{namespace_id}"


def chain_root(fingerprint: bytes, domain: str, salt: bytes = b"") -> BlockHash:
    """Where a chain starts."""
    fields = _encode_fields(fingerprint, domain, salt, b"")
    return BlockHash(blake2b(fields, digest_size=HASH_BYTES, person=_ROOT).digest())


def next_hash(parent: BlockHash, block_token_ids: Sequence[int]) -> BlockHash:
    """Hash of the block that follows `parent` (a root or a block) and holds exactly these tokens.

    Raises InvalidRequest for a token id outside 0 .. 2**32 - 1.
    """
    packed = _pack(block_token_ids)
    return BlockHash(blake2b(packed, digest_size=HASH_BYTES, key=parent, person=_CHAIN).digest())


def edited_parent(parent: BlockHash, digest: bytes) -> BlockHash:
    """What takes the place of `parent` (a root or a block) for the first block that an edit touched, or that was taken
    over: nothing behind it meets the plain chain. `digest` names the edit or the derivation."""
    return BlockHash(blake2b(digest, digest_size=HASH_BYTES, key=parent, person=_EDIT).digest())


def converted_hash(
    parent: BlockHash | None, source: BlockHash, source_fingerprint: bytes, target_fingerprint: bytes
) -> BlockHash:
    """Hash of a block that was converted from the block `source` of another format, behind `parent` (None: first): it
    is not what the target format would compute of these tokens, and never meets it."""
    fields = _encode_fields(source_fingerprint, target_fingerprint, source)
    return BlockHash(blake2b(fields, digest_size=HASH_BYTES, key=parent or b"", person=_CONVERTED).digest())


def following_hash(plain: BlockHash, converted: BlockHash) -> BlockHash:
    """Hash of a block that was computed behind converted ones, the last of them `converted`; `plain` names its tokens
    and all before them."""
    return BlockHash(blake2b(converted, digest_size=HASH_BYTES, key=plain, person=_FOLLOWING).digest())


def chain_hashes(
    root: BlockHash, token_ids: Sequence[int], block_tokens: int, edits: Sequence[tuple[int, bytes]] = ()
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, in order; a partial last block has none.

    `edits` are (first token touched, digest), by position. Raises InvalidRequest for a token id outside
    0 .. 2**32 - 1.
    """
    touched: dict[int, list[bytes]] = {}
    for position, digest in edits:
        touched.setdefault(4 * block_tokens * (position // block_tokens), []).append(digest)
    num_blocks = len(token_ids) // block_tokens
    packed = _pack(token_ids[: num_blocks * block_tokens])
    block_bytes = 4 * block_tokens
    hashes: list[BlockHash] = []
    parent: bytes = root
    for start in range(0, num_blocks * block_bytes, block_bytes):
        tokens = packed[start : start + block_bytes]
        for digest in touched.get(start, ()) if touched else ():
            parent = edited_parent(BlockHash(parent), digest)
        parent = blake2b(tokens, digest_size=HASH_BYTES, key=parent, person=_CHAIN).digest()
        hashes.append(BlockHash(parent))
    return hashes


def _pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit words: the same on every machine."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        raise InvalidRequest("token ids must be whole numbers from 0 to 4294967295", field="prompt") from None
