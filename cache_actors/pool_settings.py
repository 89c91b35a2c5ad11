"""What one pool actor is told at its start: the part of the configuration that concerns its device."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from remora.cache_actors.arena_header import ArenaIdentity
from remora.cache_actors.memory_budget import MiB
from remora.cache_actors.process_watch import boot_id
from remora.namespaces.commands import Quota, SetQuota
from remora.platform.base import paths
from remora.platform.base.config import DeviceConfig, RemoraConfig, TelemetryConfig
from remora.platform.base.errors import ConfigError
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId, PoolId

#: Changes whenever an old journal, snapshot or arena could not be read right any more.
STATE_FORMAT = 7
#: Lease id of commands of the pool itself.
POOL_LEASE = LeaseId("")


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a pool needs to start, or to come back after a crash."""

    cluster_name: str
    pool_id: PoolId
    #: Short name of the Ray session; arenas of other sessions that nobody owns are orphans of this device.
    session: str
    device: DeviceConfig
    quotas: tuple[SetQuota, ...]
    shm_dir: Path
    state_dir: Path
    object_store_bytes: int
    debug: bool = False
    #: Ray's id of the node.
    node_id: str = ""
    #: Namespaces whose sealed blocks are copied to another node, and how fast at most.
    replicated: tuple[NamespaceId, ...] = ()
    replication_bytes_per_s: int = 0
    #: None: the pool writes no spans.
    telemetry: TelemetryConfig | None = None

    @staticmethod
    def from_config(config: RemoraConfig, device_name: str, *, node_id: str, session_name: str) -> PoolSettings:
        """Settings of the pool of a device on a node. Raises ConfigError for an unknown device."""
        devices = {device.name: device for device in config.devices}
        if device_name not in devices:
            raise ConfigError(f"devices: no device {device_name!r}; one of {sorted(devices)}")
        device = devices[device_name]
        session = hashlib.blake2b(session_name.encode(), digest_size=4).hexdigest()
        return PoolSettings(
            cluster_name=config.cluster.name,
            pool_id=PoolId(f"{device_name}-{node_id[:8]}-{session}"),
            session=session,
            device=device,
            quotas=tuple(
                SetQuota(
                    lease_id=POOL_LEASE,
                    namespace_id=NamespaceId(namespace.name),
                    model_id=ModelId(model.name),
                    quota=Quota(
                        guaranteed_bytes=int(namespace.guaranteed),
                        limit_bytes=int(device.arena_bytes if namespace.limit is None else namespace.limit),
                        weight=namespace.weight,
                    ),
                    tenant=namespace.tenant,
                    share_group=namespace.share_group,
                    kv_precision=namespace.kv_precisions,
                )
                for model in config.models
                if device_name in model.devices
                for namespace in config.namespaces_of(model.name)
            ),
            shm_dir=paths.SHARED_MEMORY_DIR,
            state_dir=config.cluster.state_dir or paths.default_state_dir(),
            object_store_bytes=int(config.cluster.object_store_bytes),
            debug=config.cluster.debug,
            node_id=node_id,
            replicated=tuple(
                NamespaceId(namespace.name)
                for model in config.models
                if device_name in model.devices
                for namespace in config.namespaces_of(model.name)
                if namespace.kv_replicas > 1
            ),
            replication_bytes_per_s=int(config.replication.max_bytes_per_s),
            telemetry=config.telemetry,
        )

    def identity(self) -> ArenaIdentity:
        """What an arena must match to be adopted. Node and session are left out: they change with each start."""
        return ArenaIdentity(
            cluster_name=self.cluster_name,
            device_name=self.device.name,
            boot_id=boot_id(),
            data_bytes=int(self.device.arena_bytes),
            layout=f"{STATE_FORMAT}:{self.device.kind}:{int(self.device.extent_bytes)}:{self.device.eviction}",
        )

    def journal_spare_bytes(self) -> int:
        """Room to keep beside the arena for its journal and one snapshot of it."""
        return max(16 * MiB, int(self.device.arena_bytes) // 64)
