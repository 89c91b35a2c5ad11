"""Tells pools that live on what a new configuration grants. A pool reads its configuration only when it is created."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import ray
from ray.exceptions import RayError

from remora.cache_actors.pool_actor import find_pools
from remora.cache_actors.pool_messages import PoolDescription
from remora.cache_actors.pool_settings import POOL_LEASE, PoolSettings
from remora.namespaces.commands import Quota, Refused, SetQuota
from remora.namespaces.report import NamespaceReport
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import ConfigError

logger = logging.getLogger(__name__)

#: A pool on a lost node never answers; it must not hold up the others.
TIMEOUT_S = 10.0


def update_quotas(config: RemoraConfig) -> None:
    """Creates and changes namespaces in every pool of the cluster. Ray must be initialised; blocks.

    Namespaces that are configured no more keep what they hold until somebody else wants it. Raises ConfigError when a
    pool refuses; changes it had accepted before stay.
    """
    devices = {device.name for device in config.devices}
    for pool in find_pools(config.cluster.name):
        try:
            description: PoolDescription = ray.get(pool.describe.remote(), timeout=TIMEOUT_S)
            pool_id = description.binding.pool_id
            device_name = pool_id.rsplit("-", 2)[0]
            if device_name not in devices:
                continue
            wanted = PoolSettings.from_config(config, device_name, node_id="", session_name="").quotas
            for command in quota_changes(description.report.namespaces, wanted):
                answer = ray.get(pool.set_quota.remote(command), timeout=TIMEOUT_S)
                if isinstance(answer, Refused):
                    raise ConfigError(f"pool {pool_id}: {answer.message}")
        except (RayError, TimeoutError) as error:
            logger.warning("a pool keeps its quotas, it does not answer: %s", str(error).partition("\n")[0])


def quota_changes(present: Sequence[NamespaceReport], wanted: Sequence[SetQuota]) -> list[SetQuota]:
    """The commands that lead from one to the other: guarantees go down before any goes up, so that they always fit."""
    known = {namespace.namespace_id: namespace for namespace in present}
    configured = {command.namespace_id for command in wanted}
    removed = [
        SetQuota(
            lease_id=POOL_LEASE,
            namespace_id=namespace.namespace_id,
            model_id=namespace.model_id,
            quota=msgspec.structs.replace(_quota_of(namespace), guaranteed_bytes=0),
            tenant=namespace.tenant,
            share_group=namespace.share_group,
        )
        for namespace in present
        if namespace.namespace_id not in configured and namespace.guaranteed_bytes
    ]
    changed = [
        command
        for command in wanted
        if command.namespace_id not in known or not _is_as_wanted(known[command.namespace_id], command)
    ]

    def growth(command: SetQuota) -> int:
        before = known.get(command.namespace_id)
        return command.quota.guaranteed_bytes - (before.guaranteed_bytes if before is not None else 0)

    return [*removed, *sorted(changed, key=growth)]


def _quota_of(namespace: NamespaceReport) -> Quota:
    return Quota(
        guaranteed_bytes=namespace.guaranteed_bytes, limit_bytes=namespace.limit_bytes, weight=namespace.weight
    )


def _is_as_wanted(namespace: NamespaceReport, command: SetQuota) -> bool:
    return (_quota_of(namespace), namespace.model_id, namespace.tenant, namespace.share_group) == (
        command.quota,
        command.model_id,
        command.tenant,
        command.share_group,
    )
