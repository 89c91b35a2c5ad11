"""Which unreferenced block goes first.

A policy orders the evictable blocks of one holding (one namespace in one geometry). Two invariants of the block ledger
make leaf-first eviction cheap: a sequence that references a block references all its ancestors, and references are
dropped tail first. So in order of release children come before their parents, and the oldest block is a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from remora.platform.base.errors import ConfigError

if TYPE_CHECKING:
    from remora.namespaces.blocks import Block


class EvictionPolicy(Protocol):
    """Holds the sealed, unreferenced blocks of one holding. Every operation is O(log n) at most."""

    def add(self, block: Block) -> None:
        """The block lost its last reference."""
        ...

    def remove(self, block: Block) -> None:
        """The block is referenced again, or gone."""
        ...

    def first(self) -> Block | None:
        """The block to give up next; None when there is none. It stays until it is removed."""
        ...

    def ordered(self) -> Iterable[Block]:
        """All blocks so that adding them in this order to an empty policy gives an equal policy."""
        ...

    def __len__(self) -> int: ...


class LruPolicy:
    """Least recently released first. O(1) an operation."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, Block] = OrderedDict()

    def add(self, block: Block) -> None:
        self._blocks[block.index] = block

    def remove(self, block: Block) -> None:
        del self._blocks[block.index]

    def first(self) -> Block | None:
        return next(iter(self._blocks.values()), None)

    def ordered(self) -> Iterable[Block]:
        return self._blocks.values()

    def __len__(self) -> int:
        return len(self._blocks)


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy}


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by its configured name. Raises ConfigError for an unknown one."""
    try:
        return _POLICIES[name]()
    except KeyError:
        raise ConfigError(f"eviction: {name!r} is not allowed; one of {sorted(_POLICIES)}") from None
