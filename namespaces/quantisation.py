"""What a namespace has cached in one precision is re-encoded into another, and the room of the old blocks given up.

    source    a ── b ── c        leaf by leaf: the path from the root is converted as far as it is not yet, then the
    target    a' ─ b' ─ c'       old blocks go from the leaf up, as far as nobody uses them

Sealed bytes stay as they are until their block is freed; the new blocks are sealed under the names of converted ones
(namespaces/kept_chains.py) in the same command, and their bytes are written as an effect before its answer leaves, so
that nobody finds a block whose bytes are not there. New blocks are charged like any other, and room for them is made by
the same rules (namespaces/placement.py); nothing that runs is preempted for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from remora.namespaces.admission import Admission
from remora.namespaces.blocks import Block
from remora.namespaces.commands import Refused
from remora.namespaces.extents import GeometrySpace
from remora.namespaces.hashing import converted_hash
from remora.namespaces.placement import Shortage
from remora.namespaces.pool_parts import PoolParts
from remora.namespaces.prefix_index import Realm, RealmKey
from remora.namespaces.quantise_commands import KVFormat, Quantise, Quantised
from remora.namespaces.quotas import Namespace
from remora.platform.base.ids import BlockHash


class Quantisation:
    """Uses and changes a pool's parts."""

    def __init__(self, parts: PoolParts, admission: Admission) -> None:
        self.parts = parts
        self.admission = admission

    def quantise(self, command: Quantise, now_s: float) -> Quantised | Refused:
        """One round; a refusal changes nothing."""
        namespace = self.parts.book.namespaces.get(command.namespace_id)
        if namespace is None:
            return Refused(error="NotFound", message=f"no namespace {command.namespace_id!r} in this pool")
        space = self.parts.book.space_of(namespace)
        if space is None or space.geometry != command.target.geometry:
            # Elsewhere its guarantee would not count whole blocks of it (namespaces/quotas.py).
            message = f"what is wanted is not the precision that namespace {command.namespace_id!r} has"
            return Refused(error="InvalidRequest", message=message)
        if not all(_fits(each, command.target) for each in command.sources):
            return Refused(error="InvalidRequest", message="a source differs from the target in more than precision")
        before_bytes = namespace.tree_held_bytes
        round_ = _Round(self.parts, namespace, space, command)
        round_.run()
        if round_.num_freed:
            self.admission.pump(now_s)
        return Quantised(
            num_converted_blocks=round_.num_converted,
            num_freed_blocks=round_.num_freed,
            num_left_blocks=sum(1 for _ in round_.cached()),
            before_bytes=before_bytes,
            after_bytes=namespace.tree_held_bytes,
        )


class _Round:
    """What one command does."""

    def __init__(self, parts: PoolParts, namespace: Namespace, space: GeometrySpace, command: Quantise) -> None:
        self.parts = parts
        self.namespace = namespace
        self.space = space
        self.fingerprint = command.target.fingerprint
        self.sources: Mapping[str, bytes] = {each.geometry.geometry_id: each.fingerprint for each in command.sources}
        self.left_bytes = command.max_bytes
        self.num_converted = 0
        self.num_freed = 0

    def cached(self) -> Iterator[Block]:
        """Cached blocks of the tree that are in one of the source formats."""
        for holding in self.parts.book.holdings():
            fingerprint = self.sources.get(holding.space.geometry_id)
            if fingerprint is not None and self.namespace.contains(holding.namespace):
                for block in holding.policy.blocks():
                    if block.realm is not None and block.realm.key.fingerprint == fingerprint:
                        yield block

    def run(self) -> None:
        """Leaf by leaf, those that were used last first: what makes room is the other end."""
        leaves = sorted(
            (block for block in self.cached() if not block.children),
            key=lambda block: (-block.stamp, block.holding.space.order, block.index),
        )
        for leaf in leaves:
            if self.left_bytes <= 0:
                return
            if leaf.extent.blocks.get(leaf.index) is not leaf or leaf.children:
                continue  # it made room for another
            if not self._convert(leaf):
                return
            self._free(leaf)

    def _convert(self, leaf: Block) -> bool:
        """Converts the path to the leaf, as far as it has not been; False when that has to go on in another round."""
        path = _path(leaf)
        realm, names = self._target(leaf), list[BlockHash]()
        for block in path:
            names.append(self._name(names[-1] if names else None, block))
        twins = self.parts.index.match(realm, names, len(names))
        size = leaf.holding.space.block_bytes
        missing = path[len(twins) :][: max(1, -(-self.left_bytes // size))]
        if not missing:
            return True
        ledger = self.parts.ledger
        for block in (*path, *twins):
            ledger.acquire(block)
        plan = self.parts.placement.plan(leaf.holding.namespace, self.space, len(missing))
        is_possible = not isinstance(plan, Shortage)
        if not isinstance(plan, Shortage):
            self.parts.placement.apply(plan, self.space)
            fresh = ledger.grant(leaf.holding.namespace, self.space, len(missing))
            pairs = [(source.index, block.index) for source, block in zip(missing, fresh, strict=True)]
            ledger.reencode(leaf.holding.space, self.space, pairs)
            for source, block in zip(missing, fresh, strict=True):
                block.level = source.level
                ledger.seal(block, realm, names[len(twins)], twins[-1] if twins else None)
                twins.append(block)
            self.num_converted += len(missing)
            self.left_bytes -= len(missing) * size
        for block in (*reversed(twins), *reversed(path)):
            ledger.drop(block)
        return is_possible and len(twins) == len(path)

    def _free(self, leaf: Block) -> None:
        """Frees converted blocks from the leaf up, as far as they are the tree's own and nobody needs them."""
        block: Block | None = leaf
        while block is not None and not block.refs and not block.children:
            if not self.namespace.contains(block.holding.namespace):
                return
            parent = block.parent
            self.parts.ledger.evict(block, "quantized")
            self.num_freed += 1
            block = parent

    def _target(self, block: Block) -> Realm:
        return self.parts.index.realm(
            RealmKey(self.space.geometry_id, self.fingerprint, block.holding.namespace.domain)
        )

    def _name(self, parent: BlockHash | None, block: Block) -> BlockHash:
        assert block.block_hash is not None
        return converted_hash(parent, block.block_hash, self.sources[block.holding.space.geometry_id], self.fingerprint)


def _path(leaf: Block) -> list[Block]:
    """From the first block of its chain to the leaf."""
    path: list[Block] = []
    block: Block | None = leaf
    while block is not None:
        path.append(block)
        block = block.parent
    return path[::-1]


def _fits(source: KVFormat, target: KVFormat) -> bool:
    return source.geometry != target.geometry and source.geometry.differs_in_precision_only(target.geometry)
