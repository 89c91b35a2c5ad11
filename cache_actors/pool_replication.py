"""The two sides of replication in one pool actor: what goes out, and what comes in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from remora.cache_actors.backup_store import BackupStore
from remora.cache_actors.block_loader import ThreadedLoader
from remora.cache_actors.durable_pool import DurablePool
from remora.cache_actors.pool_messages import ReplicationOrder
from remora.cache_actors.pool_reader import PoolReaders
from remora.cache_actors.pool_settings import PoolSettings
from remora.cache_actors.replicator import ClusterBackups, Replicator
from remora.namespaces.commands import AnyAnswer, AnyCommand, Attach
from remora.namespaces.replication import ReplicationReport
from remora.platform.base.ids import LeaseId, NamespaceId
from remora.platform.base.telemetry import setup_telemetry


class PoolReplication:
    """Owned by the pool actor's event loop."""

    def __init__(
        self,
        settings: PoolSettings,
        pool: DurablePool,
        *,
        attach: Callable[[Attach], AnyAnswer],
        commit: Callable[[list[AnyCommand]], list[AnyAnswer]],
        in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`attach` and `commit` apply commands as the actor does; `in_background` runs a task until the actor ends."""
        readers = PoolReaders(settings.cluster_name, settings.node_id)
        self._store = BackupStore(pool, ThreadedLoader(readers.find), attach=attach, commit=commit)
        self._replicator: Replicator | None = None
        if settings.replicated:
            if settings.telemetry is not None:
                setup_telemetry(f"pool-{settings.device.name}", settings.telemetry, settings.state_dir)
            backups = ClusterBackups(settings.cluster_name, settings.node_id)
            self._replicator = Replicator(pool, settings, backups, commit)
            in_background(self._replicator.run())

    def note(self, commands: Sequence[AnyCommand]) -> None:
        """A replica's commands have been applied."""
        if self._replicator is not None:
            self._replicator.note(commands)

    async def take(self, data: bytes) -> bytes:
        """Fetches and stores what another node's pool has sealed."""
        order = msgspec.msgpack.decode(data, type=ReplicationOrder)
        return msgspec.msgpack.encode(await self._store.take(order))

    def owns(self, lease_id: LeaseId) -> bool:
        """Whether a lease is the store's own, and no replica's."""
        return self._store.owns(lease_id)

    def report(self) -> dict[NamespaceId, ReplicationReport]:
        """By namespace whose blocks are copied to other nodes."""
        return {} if self._replicator is None else self._replicator.report()

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant is broken."""
        if self._replicator is not None:
            self._replicator.check_integrity()
