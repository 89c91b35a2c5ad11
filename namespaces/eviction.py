"""Which unreferenced block goes first: one interface, four policies.

    add ──► cached ──take──► referenced ──add──► cached ──evict──► gone, perhaps remembered as a ghost
                                └─ hit: an admission found it

A policy orders the cached (sealed, unreferenced) blocks of one holding (one namespace in one geometry). The ledger
makes any order leaf-first: when the first block has children, a leaf below it goes instead. Two invariants of the
ledger make that rare: a sequence that references a block references all its ancestors, and references are dropped tail
first. So a block is never found more often or more recently than its ancestors, and in order of release children come
first.

Policies are deterministic, and `dump` holds all that decides about the future: a pool that is restored from a snapshot
and replays its journal evicts the same blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import msgspec

from remora.platform.base.errors import ConfigError

if TYPE_CHECKING:
    from remora.namespaces.blocks import Block


class EvictionPolicy(Protocol):
    """Holds the cached blocks of one holding. Every operation is O(log n) at most, amortised.

    A cached block may come to lie elsewhere (`Block.index` changes) without a word to the policy.
    `Block.uses`, `Block.stamp` and `Block.rank` are the policy's own notes; 0 in a block it has not seen. They stay
    with the block while it is referenced and are part of the pool's snapshot.
    """

    def add(self, block: Block) -> None:
        """The block lost its last reference."""
        ...

    def take(self, block: Block) -> None:
        """The cached block is referenced, or goes to another holding. In itself no sign that it is worth more."""
        ...

    def hit(self, block: Block) -> None:
        """An admission found the block and references it now."""
        ...

    def retire(self, block: Block) -> None:
        """Nobody is expected to come back for the cached block: its session has ended. A hint; it stays cached."""
        ...

    def evict(self, block: Block) -> None:
        """The cached block is gone; its content may be remembered by its hash."""
        ...

    def first(self) -> Block | None:
        """The block to give up next; None when there is none. It stays until it is taken or evicted."""
        ...

    def blocks(self) -> Iterable[Block]:
        """All cached blocks, in no order that means anything."""
        ...

    def dump(self) -> bytes:
        """Everything the policy knows besides its notes in blocks. Equal policies give equal bytes."""
        ...

    def load(self, data: bytes, blocks: Mapping[int, Block]) -> None:
        """Makes a new policy equal to the one that gave `data`; `blocks` by index, with their notes."""
        ...

    def __len__(self) -> int: ...


class LruPolicy:
    """Least recently released first. O(1) an operation."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def add(self, block: Block) -> None:
        self._blocks[block] = None

    def take(self, block: Block) -> None:
        del self._blocks[block]

    def hit(self, block: Block) -> None:
        """Taking and adding it again is all that counts."""

    def retire(self, block: Block) -> None:
        """Recency knows nothing of sessions."""

    def evict(self, block: Block) -> None:
        del self._blocks[block]

    def first(self) -> Block | None:
        return next(iter(self._blocks), None)

    def blocks(self) -> Iterable[Block]:
        return self._blocks

    def dump(self) -> bytes:
        return msgspec.msgpack.encode([block.index for block in self._blocks])

    def load(self, data: bytes, blocks: Mapping[int, Block]) -> None:
        self._blocks.update((blocks[index], None) for index in msgspec.msgpack.decode(data, type=list[int]))

    def __len__(self) -> int:
        return len(self._blocks)


#: Policies by their configured names: module of this room and class.
_POLICIES = {
    "lru": ("eviction", "LruPolicy"),
    "s3fifo": ("eviction_s3fifo", "S3FifoPolicy"),
    "arc": ("eviction_arc", "ArcPolicy"),
    "value": ("eviction_value", "ValuePolicy"),
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by its configured name. Raises ConfigError for an unknown one."""
    if name not in _POLICIES:
        raise ConfigError(f"eviction: {name!r} is not allowed; one of {list(POLICY_NAMES)}")
    module, class_name = _POLICIES[name]
    maker: Callable[[], EvictionPolicy] = getattr(import_module(f"remora.namespaces.{module}"), class_name)
    return maker()
