"""Takes copies of other nodes' blocks into this pool: fetched and verified beside the event loop, stored on it.

    order ─► what is missing here? ─► read at the source, which holds it (block_loader.py) ─► piece by piece:
             admitted in the background, written, sealed and let go, with no await in between

What was stored is cached KV of its namespace like any other: charged to its quota, found by its hashes, evicted when
somebody needs the room. It is written under leases of the pool's own process; a crash in the middle of a
piece ends them with it, so that nothing half-written is ever sealed.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from remora.cache_actors.arena import MappedArena
from remora.cache_actors.pool_messages import ReplicationOrder, ReplicationReply
from remora.cache_actors.port import BlockLoader, KVSource, LoadedBlocks, LoadEnd, LoadOrder
from remora.cache_actors.process_watch import process_identity
from remora.namespaces.commands import (
    Admit,
    Admitted,
    AnyAnswer,
    AnyCommand,
    Attach,
    Attached,
    OverQuota,
    Publish,
    Release,
    Seal,
)
from remora.platform.base.errors import PoolError, Unavailable
from remora.platform.base.ids import BlockHash, GeometryId, LeaseId, ModelId, NamespaceId, ReplicaId, SequenceId

logger = logging.getLogger(__name__)

#: Blocks that come from elsewhere go before those that this node's own requests have used.
_PRIORITY: Final = -1


class StoringPool(Protocol):
    """The pool that stores (cache_actors/durable_pool.py)."""

    @property
    def arena(self) -> MappedArena: ...

    def find_blocks(self, namespace_id: NamespaceId, fingerprint: bytes, hashes: Sequence[BlockHash]) -> int: ...


class BackupStore:
    """Owned by the pool actor's event loop."""

    def __init__(
        self,
        pool: StoringPool,
        loader: BlockLoader,
        *,
        attach: Callable[[Attach], AnyAnswer],
        commit: Callable[[list[AnyCommand]], list[AnyAnswer]],
    ) -> None:
        """`attach` and `commit` apply commands to the pool, as its actor does."""
        self._pool = pool
        self._loader = loader
        self._attach = attach
        self._commit = commit
        self._leases: dict[tuple[ModelId, GeometryId, bytes], _OwnLease] = {}

    def owns(self, lease_id: LeaseId) -> bool:
        """Whether a lease is one of these, and no replica's."""
        return any(lease.lease_id == lease_id for lease in self._leases.values())

    async def take(self, order: ReplicationOrder) -> ReplicationReply:
        """Fetches and stores what the pool lacks of a chain, at most `max_blocks`. Never raises: what did not come is
        told."""
        num_here = self._pool.find_blocks(order.namespace_id, order.fingerprint, order.hashes)
        wanted = order.hashes[: num_here + order.max_blocks]
        if num_here == len(order.hashes):
            return ReplicationReply(num_there=num_here)
        try:
            lease = self._lease_for(order)
        except (PoolError, Unavailable) as error:
            is_refused = isinstance(error, PoolError)
            return ReplicationReply(num_there=num_here, problem=str(error), is_refused=is_refused)
        storing = _Storing(order, lease, num_here)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[LoadEnd] = loop.create_future()
        cancel = self._loader.start(
            LoadOrder(
                source=KVSource(pool_id=order.source_pool_id, actor_name=order.source_actor_name, held=order.held),
                namespace_id=order.namespace_id,
                fingerprint=order.fingerprint,
                hashes=wanted,
                first=num_here,
                geometry=order.geometry,
            ),
            lambda loaded: _post(loop, lambda: self._store(storing, loaded)),
            lambda end: _post(loop, lambda: None if ended.done() else ended.set_result(end)),
        )
        try:
            end = await ended
        except asyncio.CancelledError:
            cancel()
            raise
        return ReplicationReply(
            num_there=storing.num_there,
            num_copied=storing.num_there - num_here,
            problem=storing.problem or end.problem,
            is_refused=storing.is_refused,
        )

    def _store(self, storing: _Storing, loaded: LoadedBlocks) -> None:
        """One piece. No await: the blocks are in use for as long as it takes to write them, and nobody sees it."""
        try:
            if loaded.first == storing.num_there and len(loaded.data_NB) and not storing.problem:
                self._write(storing, loaded)
        except Unavailable as error:  # the journal has no room; nothing was changed
            storing.problem = str(error)
        finally:
            loaded.give_back()

    def _write(self, storing: _Storing, loaded: LoadedBlocks) -> None:
        order, lease = storing.order, storing.lease
        if lease.sequence_ids:
            self._apply(lease, [Release(lease_id=lease.lease_id, sequence_ids=tuple(lease.sequence_ids))])
            lease.sequence_ids.clear()
        count = loaded.first + len(loaded.data_NB)
        sequence_id = SequenceId(uuid.uuid4().hex)
        admit = Admit(
            lease_id=lease.lease_id,
            sequence_id=sequence_id,
            namespace_id=order.namespace_id,
            hashes=order.hashes[:count],
            num_tokens=count * order.geometry.block_tokens,
            num_blocks=count,
            max_blocks=count,
            priority=_PRIORITY,
            background=True,
        )
        (admitted,) = self._apply(lease, [admit])
        if not isinstance(admitted, Admitted):
            storing.is_refused = True
            storing.problem = admitted.reason if isinstance(admitted, OverQuota) else str(admitted)
            return
        lease.sequence_ids.append(sequence_id)
        first, size, data = admitted.num_cached_blocks, order.geometry.block_bytes, self._pool.arena.data
        finish: list[Publish | Release] = []
        if first >= loaded.first:
            seals: list[Seal] = []
            for position in range(first, count):
                block = admitted.blocks[position]
                data[block * size : (block + 1) * size] = loaded.data_NB[position - loaded.first]
                seals.append(Seal(sequence_id=sequence_id, position=position, block_hash=order.hashes[position]))
            finish.append(Publish(lease_id=lease.lease_id, seals=tuple(seals)))
        else:
            storing.problem = "what came before was evicted meanwhile"
        finish.append(Release(lease_id=lease.lease_id, sequence_ids=(sequence_id,)))
        self._apply(lease, finish)
        lease.sequence_ids.clear()
        if not storing.problem:
            storing.num_there = count

    def _apply(self, lease: _OwnLease, commands: Sequence[Admit | Publish | Release]) -> list[AnyAnswer]:
        """Raises Unavailable, with no effect, when the journal has no room."""
        numbered: list[AnyCommand] = [
            msgspec.structs.replace(command, call_no=number)
            for number, command in enumerate(commands, lease.next_call_no)
        ]
        answers = self._commit(numbered)
        lease.next_call_no += len(commands)
        return answers

    def _lease_for(self, order: ReplicationOrder) -> _OwnLease:
        """The lease for KV of the order's kind. Raises PoolError when the pool refuses it."""
        kind = (order.model_id, order.geometry.geometry_id, order.fingerprint)
        lease = self._leases.get(kind)
        if lease is None:
            lease = _OwnLease(LeaseId(f"backup:{order.model_id}:{uuid.uuid4().hex}"))
            answer = self._attach(
                Attach(
                    lease_id=lease.lease_id,
                    call_no=1,
                    replica_id=ReplicaId(lease.lease_id),
                    model_id=order.model_id,
                    geometry=order.geometry,
                    fingerprint=order.fingerprint,
                    process=process_identity(),
                )
            )
            if not isinstance(answer, Attached):
                raise PoolError(f"the pool takes no copies for {order.model_id}: {answer}")
            self._leases[kind] = lease
        return lease


class _OwnLease:
    """A lease of the pool's own process."""

    def __init__(self, lease_id: LeaseId) -> None:
        self.lease_id = lease_id
        self.next_call_no = 2
        #: Not released yet, because the pool could not take the call.
        self.sequence_ids: list[SequenceId] = []


class _Storing:
    """One order under way."""

    def __init__(self, order: ReplicationOrder, lease: _OwnLease, num_here: int) -> None:
        self.order = order
        self.lease = lease
        self.num_there = num_here
        self.problem = ""
        self.is_refused = False


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)
