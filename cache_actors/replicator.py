"""Keeps copies of this pool's sealed blocks on other nodes, in the background.

    Publish ─► backlog (namespaces/replication.py) ─► held here, and the chain's backup told ─► it fetches what it lacks
                      ▲ order by order, within the rate ◄──────── let go ◄────────────── how much of it is there

The backup of a chain is the pool of its model on another node that routers prefer for it once this node is gone. One
order is under way at a time; a pool that does not answer is passed over for a while. When a backup has gone or a better
one come, and after a restart of this pool, chains go to the backups that they have now: those say what they lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec
import ray
from ray.exceptions import RayError

from remora.cache_actors.block_exports import as_held, unhold_command
from remora.cache_actors.cluster_names import REGISTRY_NAME, pool_actor_name, ray_namespace
from remora.cache_actors.pool_messages import ReplicationOrder, ReplicationReply
from remora.cache_actors.pool_settings import POOL_LEASE, PoolSettings
from remora.cache_actors.port import HeldThere
from remora.cache_actors.registry_client import ReplicaDirectory
from remora.namespaces.chains import Chain, Link
from remora.namespaces.commands import AnyAnswer, AnyCommand, Publish
from remora.namespaces.hold_commands import Held, Hold
from remora.namespaces.replication import Backlog, Pace, PendingChain, ReplicationReport, backup_of
from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import BlockHash, HoldId, ModelId, NamespaceId, PoolId
from remora.platform.base.telemetry import span

logger = logging.getLogger(__name__)

#: What is sealed within this time goes together.
GATHER_S: Final = 0.25
#: Most that one order takes, in seconds of the rate and in bytes, but at least one block.
_MAX_ORDER_S: Final = 0.25
_MAX_ORDER_BYTES: Final = 16 * 1024 * 1024
#: A backup fetches for 10 seconds at most.
_ORDER_TIMEOUT_S: Final = 15.0
#: How long a pool that has not answered is passed over, and how often it is looked for one that takes a chain.
_RETRY_S: Final = 5.0
_IDLE_S: Final = 1.0
#: How often it is looked whether there are other backups, and chains that are looked at before others' calls come in.
_LOOK_S: Final = 2.0
_TIPS_AT_ONCE: Final = 64


class SealingPool(Protocol):
    """The pool whose blocks are copied (cache_actors/durable_pool.py)."""

    def find_link(self, block_hash: BlockHash) -> Link | None: ...

    def find_chain(self, tip: BlockHash) -> Chain | None: ...

    def find_tips(self, namespace_ids: Container[NamespaceId]) -> list[BlockHash]: ...


class Backups(Protocol):
    """Pools on other nodes."""

    async def of_model(self, model_id: ModelId) -> Iterable[PoolId]:
        """Those with a replica of the model that are believed to live."""
        ...

    async def order(self, pool_id: PoolId, order: ReplicationOrder) -> ReplicationReply:
        """Raises RayError or TimeoutError when the pool does not answer."""
        ...


class Replicator:
    """Owned by the pool actor's event loop."""

    def __init__(
        self,
        pool: SealingPool,
        settings: PoolSettings,
        backups: Backups,
        commit: Callable[[list[AnyCommand]], list[AnyAnswer]],
    ) -> None:
        """`commit` applies commands to the pool, as its actor does."""
        self._pool = pool
        self._commit = commit
        self._settings = settings
        self._backups = backups
        self._backlog = Backlog(settings.replicated)
        self._model_ids = {each.model_id for each in settings.quotas if each.namespace_id in settings.replicated}
        self._pace = Pace(settings.replication_bytes_per_s)
        self._wake = asyncio.Event()
        self._silent_until_s: dict[PoolId, float] = {}
        self._alone: set[ModelId] = set()
        #: The backups that chains were last sent to.
        self._backups_before: dict[ModelId, frozenset[PoolId]] = {}

    def note(self, commands: Sequence[AnyCommand]) -> None:
        """A replica's commands have been applied."""
        for command in commands:
            if not isinstance(command, Publish):
                continue
            for seal in command.seals:
                link = self._pool.find_link(seal.block_hash)
                if link is not None:
                    self._backlog.add(seal.block_hash, link, time.monotonic())
        if len(self._backlog):
            self._wake.set()

    def report(self) -> dict[NamespaceId, ReplicationReport]:
        return self._backlog.report(time.monotonic())

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant is broken."""
        self._backlog.check_integrity()

    async def run(self) -> None:
        """Copies until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._follow_backups()
            except Exception:
                logger.exception("looking for backups failed")
            if not len(self._backlog):
                continue
            await asyncio.sleep(GATHER_S)
            for _ in range(len(self._backlog)):
                pending = self._backlog.next()
                if pending is None:
                    break
                try:
                    await self._copy(pending)
                except Unavailable as error:  # the journal has no room for a hold
                    logger.warning("blocks of %s are not copied now: %s", pending.namespace_id, error)
                except Exception:
                    logger.exception("copying blocks of %s failed", pending.namespace_id)
                    self._backlog.drop(pending)
            if len(self._backlog):
                # What is left could not be copied now.
                asyncio.get_running_loop().call_later(_IDLE_S, self._wake.set)

    async def _follow_backups(self) -> None:
        """Makes pending what has another backup than before."""
        for model_id in self._model_ids:
            pools = frozenset(await self._backups.of_model(model_id))
            before = self._backups_before.get(model_id, frozenset())
            if not pools or pools == before:
                continue
            self._backups_before[model_id] = pools
            for number, tip in enumerate(self._pool.find_tips(self._settings.replicated)):
                if number % _TIPS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                chain = self._pool.find_chain(tip)
                if chain is None or chain.model_id != model_id or backup_of(chain, before) == backup_of(chain, pools):
                    continue
                if not self._backlog.add_chain(chain, time.monotonic()):
                    logger.warning("too many chains of %s have another backup now; some wait until they grow", model_id)
                    break

    async def _copy(self, pending: PendingChain) -> None:
        """Order after order, until the chain is on its backup or cannot be copied now."""
        while True:
            tip = pending.tip
            chain = self._pool.find_chain(tip)
            if chain is None:
                self._backlog.forget(pending)
                return
            await asyncio.sleep(self._pace.wait_s(time.monotonic()))
            backup = await self._choose(chain)
            if backup is None:
                return
            hold_id = HoldId(uuid.uuid4().hex)
            try:
                reply = await self._order(backup, chain, HeldThere(hold_id=hold_id, held=self._hold(hold_id, chain)))
            finally:
                self._commit([unhold_command([hold_id])])
            if reply is None:
                return
            num_missing = len(chain.hashes) - reply.num_there
            num_bytes = reply.num_copied * pending.block_bytes
            now_s = time.monotonic()
            self._pace.spend(num_bytes, now_s)
            self._backlog.copied(pending, tip, num_copied=reply.num_copied, num_missing=num_missing, now_s=now_s)
            if reply.is_refused:
                logger.warning("pool %s takes no copy for %s: %s", backup, chain.namespace_id, reply.problem)
                self._backlog.drop(pending)
                return
            if not num_missing or not reply.num_copied:
                return

    async def _choose(self, chain: Chain) -> PoolId | None:
        now_s = time.monotonic()
        pools = [
            pool_id
            for pool_id in await self._backups.of_model(chain.model_id)
            if self._silent_until_s.get(pool_id, 0.0) <= now_s
        ]
        if not pools and chain.model_id not in self._alone:
            self._alone.add(chain.model_id)
            logger.warning("no pool on another node takes copies for %s now", chain.model_id)
        elif pools:
            self._alone.discard(chain.model_id)
        return backup_of(chain, pools)

    def _hold(self, hold_id: HoldId, chain: Chain) -> Held:
        command = Hold(
            lease_id=POOL_LEASE,
            hold_id=hold_id,
            namespace_id=chain.namespace_id,
            fingerprint=chain.fingerprint,
            hashes=chain.hashes,
            hold_s=_ORDER_TIMEOUT_S,
        )
        return as_held(self._commit([command])[0])

    async def _order(self, backup: PoolId, chain: Chain, held: HeldThere) -> ReplicationReply | None:
        """None when the backup does not answer."""
        settings = self._settings
        order_bytes = min(_MAX_ORDER_BYTES, settings.replication_bytes_per_s * _MAX_ORDER_S)
        order = ReplicationOrder(
            source_pool_id=settings.pool_id,
            source_actor_name=pool_actor_name(settings.device.name, settings.node_id),
            namespace_id=chain.namespace_id,
            model_id=chain.model_id,
            geometry=chain.geometry,
            fingerprint=chain.fingerprint,
            hashes=chain.hashes,
            held=held,
            max_blocks=max(1, int(order_bytes) // chain.geometry.block_bytes),
        )
        with span(names.REPLICATE, {names.REMORA_NAMESPACE: chain.namespace_id}) as replicate:
            try:
                async with asyncio.timeout(_ORDER_TIMEOUT_S):
                    reply = await self._backups.order(backup, order)
            except (RayError, TimeoutError) as error:
                logger.warning("pool %s takes no copies now: %s", backup, str(error).partition("\n")[0])
                self._silent_until_s[backup] = time.monotonic() + _RETRY_S
                return None
            replicate.set_attribute(names.REMORA_REPLICATE_TARGET, backup)
            replicate.set_attribute(names.REMORA_REPLICATE_BLOCKS, reply.num_copied)
            replicate.set_attribute(names.REMORA_REPLICATE_BYTES, reply.num_copied * chain.geometry.block_bytes)
            replicate.set_attribute(names.REMORA_REPLICATE_CHAIN_BLOCKS, len(chain.hashes))
            if reply.problem:
                replicate.set_attribute(names.REMORA_REPLICATE_PROBLEM, reply.problem)
        return reply


class ClusterBackups:
    """Backups that the registry's directory knows."""

    def __init__(self, cluster_name: str, node_id: str) -> None:
        """`node_id`: the node whose pools are no backups."""
        self._namespace = ray_namespace(cluster_name)
        self._node_id = node_id
        self._directory: ReplicaDirectory | None = None
        self._actor_names: dict[PoolId, str] = {}
        self._actors: dict[str, Any] = {}

    async def of_model(self, model_id: ModelId) -> Iterable[PoolId]:
        """None while there is no registry yet."""
        if self._directory is None:
            try:
                registry = await asyncio.to_thread(ray.get_actor, REGISTRY_NAME, self._namespace)
                directory = ReplicaDirectory(registry)
                await directory.start()
            except (ValueError, RayError):
                return ()
            self._directory = directory
        found: dict[PoolId, str] = {
            record.pool_id: record.pool_actor_name
            for record in self._directory.replicas(model_id)
            if record.node_id != self._node_id and record.status != "lost" and record.pool_actor_name
        }
        self._actor_names.update(found)
        return found

    async def order(self, pool_id: PoolId, order: ReplicationOrder) -> ReplicationReply:
        name = self._actor_names[pool_id]
        try:
            actor = self._actors.get(name)
            if actor is None:
                actor = self._actors[name] = await asyncio.to_thread(ray.get_actor, name, self._namespace)
            data = await actor.replicate.remote(msgspec.msgpack.encode(order))
        except ValueError as error:
            raise TimeoutError(f"there is no pool actor {name}") from error
        except RayError:
            self._actors.pop(name, None)
            raise
        return msgspec.msgpack.decode(data, type=ReplicationReply)
