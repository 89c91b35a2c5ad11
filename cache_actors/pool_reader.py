"""Pool actors as readers of other pools see them.

on the same node        the arena is mapped
on another node         its blocks come over a link (block_server.py), which stays open for the next reader; or through
                        Ray, where there are no links or none can be made
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from remora.cache_actors.arena import Arena
from remora.cache_actors.block_exports import BlockBytes, copy_blocks
from remora.cache_actors.block_links import LinkedBlocks, PoolLinks
from remora.cache_actors.block_loader import HeldReader, SourcePool
from remora.cache_actors.byte_link import LinkAddress
from remora.cache_actors.cluster_names import is_on_node, ray_namespace
from remora.cache_actors.pool_messages import HoldReply
from remora.cache_actors.port import HeldThere, KVSource
from remora.namespaces.hold_commands import Held, Hold
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import HoldId

#: Longest that a pool may take to answer one call.
CALL_TIMEOUT_S: Final = 5.0


class PoolReaders:
    """Finds the pools of a cluster for a process on `node_id`. Thread-safe."""

    def __init__(self, cluster_name: str, node_id: str) -> None:
        self._cluster_name = cluster_name
        self._node_id = node_id
        self._pools: dict[str, RemotePool] = {}
        self._lock = threading.Lock()

    def find(self, source: KVSource) -> SourcePool:
        """The pool, or what it holds for this reader already. Raises Unavailable when there is no such actor."""
        found = self._find(source)
        return found if source.held is None else HeldPool(found, source.held)

    def prepare(self, source: KVSource) -> None:
        """Has a link made to a pool of another node, in the background."""
        if not is_on_node(source.actor_name, self._node_id):
            threading.Thread(target=self._prepare, args=(source,), name="kv-link", daemon=True).start()

    def _prepare(self, source: KVSource) -> None:
        with suppress(Unavailable):  # what is not there is computed
            self._find(source).links.prepare()

    def read_tail(
        self, source: KVSource, blocks: Sequence[int], block_bytes: int, *, timeout_s: float
    ) -> Iterator[NDArray[np.uint8]]:
        """Blocks wherever they lie, each valid until the next; nothing without a link to the pool. Raises Unavailable
        when they do not come in time."""
        with self._lock:
            found = self._pools.get(source.actor_name)
        if found is not None:
            yield from found.links.read_tail(blocks, block_bytes, timeout_s=timeout_s)

    def _find(self, source: KVSource) -> RemotePool:
        with self._lock:
            found = self._pools.get(source.actor_name)
        if found is not None:
            return found
        try:
            actor = ray.get_actor(source.actor_name, namespace=ray_namespace(self._cluster_name))
        except ValueError:
            raise Unavailable(f"there is no pool actor {source.actor_name}") from None
        found = RemotePool(source.actor_name, actor, self._node_id, on_silent=lambda: self._forget(source))
        with self._lock:
            return self._pools.setdefault(source.actor_name, found)

    def _forget(self, source: KVSource) -> None:
        """Another actor may have the name next time."""
        with self._lock:
            self._pools.pop(source.actor_name, None)


class RemotePool:
    """block_loader.SourcePool over an actor."""

    def __init__(self, name: str, actor: Any, node_id: str, *, on_silent: Callable[[], None]) -> None:
        """`on_silent` is called when the actor cannot be reached."""
        self._actor = actor
        self._node_id = node_id
        self._on_silent = on_silent
        self.links = PoolLinks(name, self._ask_links)

    def hold(self, command: Hold) -> HeldReader:
        """Chooses the path by where the pool is."""
        try:
            data = _answer(self._actor.hold.remote(msgspec.msgpack.encode(command)))
        except Unavailable:
            self._on_silent()
            raise
        reply = msgspec.msgpack.decode(data, type=HoldReply)
        if reply.node_id == self._node_id and reply.arena_path:
            return MappedBlocks(self._actor, command.hold_id, reply)
        return self.read(command.hold_id, reply.held, partial(_let_go, self._actor, command.hold_id, reply.held))

    def read(self, hold_id: HoldId, held: Held, let_go: Callable[[], None]) -> HeldReader:
        """Reads what a pool of another node holds; `let_go` is called when that is over."""
        link = self.links.take() if held.blocks else None
        if link is None:
            return StreamedBlocks(self._actor, hold_id, held, let_go)
        return LinkedBlocks(self.links, link, hold_id, held, let_go)

    def _ask_links(self) -> LinkAddress | None:
        try:
            data = _answer(self._actor.open_links.remote())
        except Unavailable:
            self._on_silent()
            raise
        return msgspec.msgpack.decode(data, type=LinkAddress | None)


class HeldPool:
    """block_loader.SourcePool over blocks that their pool holds for as long as it must."""

    def __init__(self, pool: RemotePool, held: HeldThere) -> None:
        self._pool = pool
        self._held = held

    def hold(self, command: Hold) -> HeldReader:
        """Those of the wanted ones that are held."""
        held = msgspec.structs.replace(self._held.held, blocks=self._held.held.blocks[: len(command.hashes)])
        return self._pool.read(self._held.hold_id, held, lambda: None)


class MappedBlocks:
    """Reads the arena of a pool of this node.

    A copy is good if the hold lasted until its end: the pool keeps a hold until `until_s`, also across its crashes, and
    a pool that starts anew changes the incarnation word of the old arena.
    """

    path: Final = "mapped"

    def __init__(self, actor: Any, hold_id: HoldId, reply: HoldReply) -> None:
        self._actor = actor
        self._hold_id = hold_id
        self._reply = reply
        self._arena: Arena | None = None

    @property
    def num_blocks(self) -> int:
        return len(self._reply.held.blocks)

    @property
    def block_bytes(self) -> int:
        return self._reply.held.block_bytes

    def read(self, first: int, into_NB: NDArray[np.uint8]) -> tuple[int, ...]:
        if self._arena is None:
            self._arena = Arena.open(Path(self._reply.arena_path), writable=False)
        sums = copy_blocks(self._arena.data, self._reply.held.blocks[first : first + len(into_NB)], into_NB)
        if self._arena.header.incarnation != self._reply.incarnation or time.monotonic() >= self._reply.held.until_s:
            raise Unavailable("its blocks were not held until they were copied")
        return sums

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
        _let_go(self._actor, self._hold_id, self._reply.held)


class StreamedBlocks:
    """Asks the pool's actor for bytes, one piece ahead of what is read."""

    path: Final = "streamed"

    def __init__(self, actor: Any, hold_id: HoldId, held: Held, let_go: Callable[[], None]) -> None:
        self._actor = actor
        self._hold_id = hold_id
        self._held = held
        self._let_go = let_go
        self._ahead: tuple[int, int, Any] | None = None

    @property
    def num_blocks(self) -> int:
        return len(self._held.blocks)

    @property
    def block_bytes(self) -> int:
        return self._held.block_bytes

    def read(self, first: int, into_NB: NDArray[np.uint8]) -> tuple[int, ...]:
        count = len(into_NB)
        ahead, self._ahead = self._ahead, None
        call = ahead[2] if ahead is not None and ahead[:2] == (first, count) else self._ask(first, count)
        after = min(count, self.num_blocks - first - count)
        if after > 0:
            self._ahead = (first + count, after, self._ask(first + count, after))
        found: BlockBytes | None = _answer(call)
        if found is None:
            raise Unavailable("its blocks are not held any more")
        into_NB[:] = found.data_NB
        return found.checksums

    def _ask(self, first: int, count: int) -> Any:
        return self._actor.read_blocks.remote(self._hold_id, first, count)

    def close(self) -> None:
        self._ahead = None
        self._let_go()


def _answer(call: Any) -> Any:
    try:
        return ray.get(call, timeout=CALL_TIMEOUT_S)
    except RayError as error:
        raise Unavailable(f"the pool does not answer: {type(error).__name__}") from None


def _let_go(actor: Any, hold_id: HoldId, held: Held) -> None:
    if held.blocks:
        actor.unhold.remote([hold_id])
