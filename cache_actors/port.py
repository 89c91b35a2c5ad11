"""What an engine needs of a pool, of its device and of other pools, whatever stands behind: actors, or this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from remora.namespaces.commands import AddFormat, Admit, AnyAnswer, AnyEvent, Extend, Publish, Release, Relocated
from remora.namespaces.geometry import KVGeometry
from remora.namespaces.hashing import Derivation
from remora.namespaces.hold_commands import Held
from remora.namespaces.sequence_commands import SequenceCommand
from remora.platform.base.ids import BlockHash, HoldId, NamespaceId, PoolId

EngineCommand = AddFormat | Admit | Extend | Publish | Release | Relocated | SequenceCommand
OnAnswer = Callable[[EngineCommand, AnyAnswer], None]
OnEvent = Callable[[AnyEvent], None]


class PoolPort(Protocol):
    """One lease on one pool, seen from the engine thread. Commands are built without lease id and call number: the
    port stamps them, in the order of `send`."""

    def bind(self, on_answer: OnAnswer, on_event: OnEvent) -> None:
        """Where answers and events go. They may be called from any thread and must return at once."""
        ...

    def send(self, command: EngineCommand) -> None:
        """Queues the command and returns at once. Each command is answered exactly once, in order."""
        ...

    def may_emit(self) -> bool:
        """False once the lease's generation or the pool's incarnation has changed: no token may leave any more.

        Reads one word of shared memory; asked after each step (design §4.1).
        """
        ...


class StepGate(Protocol):
    """Lets the replicas of one device take turns, one engine step each."""

    def turn(self) -> AbstractContextManager[None]:
        """Blocks until it is this replica's turn; the turn ends with the context."""
        ...


class OpenGate:
    """A gate for a device with one replica, and for tests."""

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()


# ---- blocks of other pools -------------------------------------------------------------------------------------------


class OtherChain(msgspec.Struct, frozen=True, kw_only=True):
    """The same tokens under the names that another model, or another precision, has for them: KV to take over."""

    derivation: Derivation
    #: Where the source has them.
    namespace_id: NamespaceId
    #: From the first block on.
    hashes: tuple[BlockHash, ...]
    #: Blocks before this one are the request's own: they are in its pool, or nothing is taken over.
    first: int


class HeldThere(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a pool of another node holds for a reader already, and for as long as it must: to be read over links
    from their process."""

    hold_id: HoldId
    held: Held


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that may have blocks which a request needs: another one, or any if they are of another chain."""

    pool_id: PoolId
    #: Name of its actor.
    actor_name: str
    #: None: under the request's own names.
    other: OtherChain | None = None
    #: None: the reader has to ask for a hold, and lets it go.
    held: HeldThere | None = None


#: How bytes come: the source's arena is mapped and copied (same node), or its process sends them (another node), over
#: a link or through Ray.
LoadPath = Literal["mapped", "linked", "streamed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Blocks wanted of a source, from number `first` of the chain on."""

    source: KVSource
    namespace_id: NamespaceId
    #: Only KV of equal shape and content will do.
    fingerprint: bytes
    hashes: tuple[BlockHash, ...]
    first: int
    #: As they are wanted: in another precision than the source has, if `source_geometry` says so.
    geometry: KVGeometry
    source_geometry: KVGeometry | None = None

    @property
    def source_block_bytes(self) -> int:
        return (self.source_geometry or self.geometry).block_bytes


class LoadedBlocks(NamedTuple):
    """Verified bytes of consecutive blocks of the chain, in the precision wanted. They are the receiver's until it says
    `give_back`."""

    first: int
    data_NB: NDArray[np.uint8]
    give_back: Callable[[], None]


class LoadEnd(NamedTuple):
    """Nothing more comes. What did not come is computed."""

    #: "" when everything that the source has came; else what went wrong.
    problem: str
    path: LoadPath | None
    num_blocks: int
    num_bytes: int
    #: Blocks whose checksum was wrong on this side.
    num_damaged: int


class BlockLoader(Protocol):
    """Gets blocks from other pools, beside the engine."""

    def start(
        self, order: LoadOrder, on_blocks: Callable[[LoadedBlocks], None], on_end: Callable[[LoadEnd], None]
    ) -> Callable[[], None]:
        """Begins and returns at once; both are called from another thread, blocks in order, the end once.

        Calling what is returned gives the load up: its end still comes.
        """
        ...


class TailBlocks(Protocol):
    """The own arena as others may read it, and those of others."""

    node_id: str
    arena_path: str

    def checksum(self, block: int, block_bytes: int) -> int:
        """Of a block of the own arena."""
        ...

    def prepare(self, source: KVSource | None) -> None:
        """A tail may soon be read from that pool: what that needs is done in the background."""
        ...

    def read(
        self,
        node_id: str,
        arena_path: str,
        blocks: Sequence[tuple[int, int]],
        block_bytes: int,
        source: KVSource | None = None,
    ) -> Iterator[NDArray[np.uint8]]:
        """Copies of (block, checksum), in order, up to the first whose checksum is another; nothing where they cannot
        be had: of another node only from `source`, in time. Raises ArenaError, or Unavailable when they do not come."""
        ...
