"""Chains of sealed blocks, found by one of their hashes: what whoever copies them elsewhere has to know."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from remora.namespaces.blocks import Block
from remora.namespaces.geometry import KVGeometry
from remora.namespaces.pool_parts import PoolParts
from remora.platform.base.ids import BlockHash, ModelId, NamespaceId


class Link(NamedTuple):
    """One sealed block, and the one before it."""

    namespace_id: NamespaceId
    parent: BlockHash | None
    block_bytes: int


class Chain(NamedTuple):
    """All blocks from the root up to one of them."""

    #: Who is charged for the last block.
    namespace_id: NamespaceId
    model_id: ModelId
    geometry: KVGeometry
    fingerprint: bytes
    hashes: tuple[BlockHash, ...]


def find_link(parts: PoolParts, block_hash: BlockHash) -> Link | None:
    """None when there is no such block (any more)."""
    block = _find(parts, block_hash)
    if block is None:
        return None
    parent = block.parent.block_hash if block.parent is not None else None
    return Link(block.holding.namespace.namespace_id, parent, block.holding.space.block_bytes)


def find_chain(parts: PoolParts, tip: BlockHash) -> Chain | None:
    """The chain that ends with `tip`; None when there is no such block (any more)."""
    block = _find(parts, tip)
    if block is None or block.realm is None:
        return None
    namespace, space = block.holding.namespace, block.holding.space
    hashes: list[BlockHash] = []
    at: Block | None = block
    while at is not None and at.block_hash is not None:
        hashes.append(at.block_hash)
        at = at.parent
    hashes.reverse()
    return Chain(namespace.namespace_id, namespace.model_id, space.geometry, block.realm.key.fingerprint, tuple(hashes))


def find_tips(parts: PoolParts, namespace_ids: Container[NamespaceId]) -> list[BlockHash]:
    """The last blocks of all chains of these namespaces."""
    return [
        block_hash
        for realm in parts.index.realms.values()
        for block_hash, block in realm.blocks.items()
        if not block.children and block.holding.namespace.namespace_id in namespace_ids
    ]


def _find(parts: PoolParts, block_hash: BlockHash) -> Block | None:
    """Hashes are those of the whole chain with its root, so one is in one realm at most."""
    return next((found for r in parts.index.realms.values() if (found := r.blocks.get(block_hash)) is not None), None)
