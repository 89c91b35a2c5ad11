"""From chain hashes to sealed blocks.

The index is cut into realms: (geometry, KV fingerprint, sharing domain). A lookup sees one realm, so a hit can never
cross models or tenants, whatever hash it asks for. On a hit the block's own record is compared as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import BlockHash, GeometryId

if TYPE_CHECKING:
    from remora.namespaces.blocks import Block


class RealmKey(NamedTuple):
    geometry_id: GeometryId
    fingerprint: bytes
    #: Number of the sharing domain (namespaces/quotas.py).
    domain: int


class Realm:
    """Blocks that may be shared with one another, by hash."""

    __slots__ = ("blocks", "key")

    def __init__(self, key: RealmKey) -> None:
        self.key = key
        self.blocks: dict[BlockHash, Block] = {}


class PrefixIndex:
    """All realms of a pool."""

    def __init__(self) -> None:
        self.realms: dict[RealmKey, Realm] = {}

    def realm(self, key: RealmKey) -> Realm:
        """The realm of a key, made on first use. It stays for as long as the pool."""
        found = self.realms.get(key)
        if found is None:
            found = self.realms[key] = Realm(key)
        return found

    @staticmethod
    def match(realm: Realm, hashes: Sequence[BlockHash], max_blocks: int) -> list[Block]:
        """The longest cached prefix of a chain, at most `max_blocks` long, without referencing it.

        A block counts only if its record says the same realm and the block before it is its parent.
        """
        found: list[Block] = []
        parent: Block | None = None
        get = realm.blocks.get
        for block_hash in hashes[:max_blocks]:
            block = get(block_hash)
            if block is None or block.realm is not realm or block.parent is not parent:
                break
            found.append(block)
            parent = block
        return found

    def find(self, fingerprint: bytes, domain: int, hashes: Sequence[BlockHash]) -> list[Block]:
        """The longest cached prefix of a chain, for who knows the content that it wants but no geometry."""
        found: list[Block] = []
        for key, realm in self.realms.items():
            if (key.fingerprint, key.domain) == (fingerprint, domain):
                found = max(found, self.match(realm, hashes, len(hashes)), key=len)
        return found

    def check_integrity(self) -> None:
        """Raises IntegrityError when an entry does not name a sealed block of its realm whose parent is indexed."""
        for realm in self.realms.values():
            for block_hash, block in realm.blocks.items():
                if block.realm is not realm or block.block_hash != block_hash:
                    raise IntegrityError(f"block {block.index} is indexed under a hash or realm that is not its own")
                if block.extent.blocks.get(block.index) is not block:
                    raise IntegrityError(f"block {block.index} is indexed but free")
                parent = block.parent
                if parent is not None and (
                    parent.block_hash is None or realm.blocks.get(parent.block_hash) is not parent
                ):
                    raise IntegrityError(f"block {block.index} is indexed but its parent is not")
