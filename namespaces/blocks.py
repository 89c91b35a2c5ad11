"""Blocks: who holds them, what they are, when they go.

    free ──grant──► private ──seal──► sealed, referenced ◄──acquire/drop──► sealed, cached ──evict──► free
                       └──drop──► free

Only blocks that are not free have a record. A sealed block knows its parent in the hash chain and its sealed children;
it is evicted only when it has no references and no children. Invariant: whoever references a sealed block references
its ancestors, so an unreferenced block has no referenced descendant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from remora.namespaces.effects import CopyBlocks, Effect, ReencodeBlocks, ZeroBlocks
from remora.namespaces.eviction import make_policy
from remora.namespaces.extents import Extent, GeometrySpace
from remora.namespaces.prefix_index import PrefixIndex, Realm
from remora.namespaces.quotas import Holding, Namespace, QuotaBook
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import BlockHash

EvictionCause = Literal["limit", "own", "borrowed", "extent", "quota", "cleared", "quantized"]
"""Why a cached block went:

limit          its namespace reached its own limit          own    its namespace needed the memory itself
borrowed       it was borrowed and another had a better claim
extent         its extent went to another geometry          quota  the quota was lowered
cleared        somebody asked for it to be forgotten
quantized      it was re-encoded into another precision
"""


class Block:
    """A block that is not free. Compared by identity."""

    __slots__ = ("block_hash", "children", "extent", "holding", "index", "level", "parent", "rank", "realm", "refs",
                 "stamp", "uses")  # fmt: skip

    def __init__(self, index: int, extent: Extent, holding: Holding) -> None:
        self.index = index
        self.extent = extent
        #: Who is charged: the first holder.
        self.holding = holding
        self.refs = 1
        #: Set when sealed, never changed afterwards.
        self.block_hash: BlockHash | None = None
        self.realm: Realm | None = None
        self.parent: Block | None = None
        #: Sealed blocks whose parent this is, by block index.
        self.children: dict[int, Block] | None = None
        #: Notes of the eviction policy (namespaces/eviction.py).
        self.uses = 0
        self.stamp = 0
        self.rank = 0
        #: Priority of the sequence that used it last.
        self.level = 0


class BlockLedger:
    """Every change of a block's state goes through here, so that records, counts, index and bytes agree."""

    def __init__(self, index: PrefixIndex, book: QuotaBook, policy_name: str) -> None:
        self.index = index
        self.book = book
        self.policy_name = policy_name
        self.num_referenced = 0
        self.effects: list[Effect] = []

    def holding(self, namespace: Namespace, space: GeometrySpace) -> Holding:
        """The namespace's blocks of one geometry, made on first use."""
        found = namespace.holdings.get(space.geometry_id)
        if found is None:
            found = namespace.holdings[space.geometry_id] = Holding(namespace, space, make_policy(self.policy_name))
        return found

    def grant(self, namespace: Namespace, space: GeometrySpace, count: int) -> list[Block]:
        """New private blocks with one reference each; the caller has made sure that so many are free."""
        if not count:
            return []
        holding = self.holding(namespace, space)
        blocks: list[Block] = []
        dirty: list[int] = []
        for extent, index in space.take(count):
            if extent.claim(index, namespace.domain):
                dirty.append(index)
            block = Block(index, extent, holding)
            space.put(extent, block)
            extent.num_referenced += 1
            blocks.append(block)
        self.num_referenced += count
        holding.used_blocks += count
        namespace.charge(count * space.block_bytes, 0)
        if dirty:
            self.effects.append(
                ZeroBlocks(geometry_id=space.geometry_id, block_bytes=space.block_bytes, blocks=tuple(dirty))
            )
        return blocks

    def acquire(self, block: Block) -> None:
        """One more reference; a cached block leaves the eviction order."""
        if not block.refs:
            holding = block.holding
            holding.policy.take(block)
            holding.used_blocks += 1
            size = holding.space.block_bytes
            holding.namespace.charge(size, -size)
            block.extent.num_referenced += 1
            self.num_referenced += 1
        block.refs += 1

    def drop(self, block: Block) -> None:
        """One reference less; at none a sealed block is cached and a private one free."""
        block.refs -= 1
        if block.refs:
            return
        holding = block.holding
        size = holding.space.block_bytes
        holding.used_blocks -= 1
        block.extent.num_referenced -= 1
        self.num_referenced -= 1
        if block.block_hash is None:
            holding.namespace.charge(-size, 0)
            holding.space.free(block.extent, block.index)
        else:
            holding.namespace.charge(-size, size)
            holding.policy.add(block)

    def relocate(self, block: Block, extent: Extent, index: int) -> None:
        """Moves the record of an unreferenced block to a free place; the caller sees to its bytes."""
        space, old_extent, old_index = block.holding.space, block.extent, block.index
        extent.claim(index, block.holding.namespace.domain)
        space.free(old_extent, old_index)
        block.extent, block.index = extent, index
        space.put(extent, block)
        self.renumber(block, old_index)

    @staticmethod
    def renumber(block: Block, old_index: int) -> None:
        """Lets the parent know its child by its new index."""
        if block.parent is not None and block.parent.children is not None:
            del block.parent.children[old_index]
            block.parent.children[block.index] = block

    def copy(self, space: GeometrySpace, pairs: list[tuple[int, int]]) -> None:
        """Has bytes copied, (from, to) in block indices; no place is both."""
        if pairs:
            self.effects.append(
                CopyBlocks(geometry_id=space.geometry_id, block_bytes=space.block_bytes, pairs=tuple(pairs))
            )

    def reencode(self, source: GeometrySpace, target: GeometrySpace, pairs: list[tuple[int, int]]) -> None:
        """Has blocks written in another precision, (from, to) in the block indices of each."""
        self.effects.append(ReencodeBlocks(source=source.geometry, target=target.geometry, pairs=tuple(pairs)))

    def retire(self, tail: Block) -> None:
        """A session that ended with this block is over: what nobody else uses or continues is not expected back."""
        block: Block | None = tail
        num_children = 0
        while block is not None and not block.refs and len(block.children or ()) == num_children:
            block.holding.policy.retire(block)
            block = block.parent
            num_children = 1

    def seal(self, block: Block, realm: Realm, block_hash: BlockHash, parent: Block | None) -> None:
        """Makes a private block immutable and findable."""
        if block.block_hash is not None or block_hash in realm.blocks:
            raise IntegrityError(f"block {block.index} or its hash is sealed already")
        block.block_hash = block_hash
        block.realm = realm
        block.parent = parent
        if parent is not None:
            if parent.children is None:
                parent.children = {}
            parent.children[block.index] = block
        realm.blocks[block_hash] = block

    def evict(self, block: Block, cause: EvictionCause) -> None:
        """Forgets a cached leaf."""
        if block.refs or block.children or block.block_hash is None or block.realm is None:
            raise IntegrityError(f"block {block.index} is referenced, private or has children: it cannot be evicted")
        holding = block.holding
        namespace = holding.namespace
        holding.policy.evict(block)
        namespace.charge(0, -holding.space.block_bytes)
        namespace.evicted_blocks[cause] = namespace.evicted_blocks.get(cause, 0) + 1
        del block.realm.blocks[block.block_hash]
        if block.parent is not None and block.parent.children is not None:
            del block.parent.children[block.index]
        holding.space.free(block.extent, block.index)

    def evict_first(self, holding: Holding, cause: EvictionCause) -> None:
        """Evicts one block charged to the holding, in the policy's order but never a parent before its children.

        Only in a share group can the last child belong to someone else; then the two swap what they are charged for,
        so that the holding shrinks by one block and nobody else's charge changes.
        """
        head = holding.policy.first()
        if head is None:
            raise IntegrityError(f"namespace {holding.namespace.namespace_id} has no cached block to evict")
        leaf = head
        while leaf.children:
            leaf = leaf.children[min(leaf.children)]
        other = leaf.holding
        if other is not holding:
            holding.policy.take(head)
            other.policy.take(leaf)
            head.holding, leaf.holding = other, holding
            for block in (head, leaf):
                block.stamp = block.rank = 0  # a place in the order of one policy means nothing in another's
            other.policy.add(head)
            holding.policy.add(leaf)
        self.evict(leaf, cause)

    def evict_trees(self, roots: Iterable[Block], cause: EvictionCause) -> None:
        """Evicts cached blocks with all their descendants, leaves first."""
        for root in roots:
            if root.extent.blocks.get(root.index) is not root:
                continue  # went with an earlier root's tree
            stack = [root]
            while stack:
                block = stack[-1]
                if block.children:
                    stack.extend(block.children[index] for index in sorted(block.children))
                else:
                    stack.pop()
                    self.evict(block, cause)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a block's state contradicts its links or counts."""
        referenced = 0
        for holding in self.book.holdings():
            cached = list(holding.policy.blocks())
            for block in cached:
                if block.refs or block.block_hash is None or block.holding is not holding:
                    raise IntegrityError(f"block {block.index} is in an eviction order but is not cached there")
            charged = [b for e in holding.space.extents.values() for b in e.blocks.values() if b.holding is holding]
            if len(charged) != holding.held_blocks:
                raise IntegrityError(f"{holding.namespace.namespace_id} is charged for blocks it does not hold")
            for block in charged:
                referenced += bool(block.refs)
                if block.block_hash is None and (not block.refs or block.children or block.parent):
                    raise IntegrityError(f"private block {block.index} is unreferenced or has relatives")
                if block.block_hash is not None and (
                    block.realm is None or block.realm.blocks.get(block.block_hash) is not block
                ):
                    raise IntegrityError(f"sealed block {block.index} is not indexed")
                for child in (block.children or {}).values():
                    if child.parent is not block or (child.refs and not block.refs):
                        raise IntegrityError(f"block {child.index} is referenced but its parent is not")
        if referenced != self.num_referenced:
            raise IntegrityError("the number of referenced blocks is miscounted")
