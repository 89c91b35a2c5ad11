"""Tells pools that live on what a new configuration grants. A pool reads its configuration only when it is created."""

from __future__ import annotations

import logging

import ray
from ray.exceptions import RayError

from remora.cache_actors.pool_handles import find_pools
from remora.cache_actors.pool_messages import PoolDescription
from remora.cache_actors.pool_settings import PoolSettings
from remora.namespaces.commands import Refused
from remora.namespaces.quota_changes import quota_changes
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import ConfigError

logger = logging.getLogger(__name__)

#: A pool on a lost node never answers; it must not hold up the others.
TIMEOUT_S = 10.0


def update_quotas(config: RemoraConfig) -> None:
    """Creates and changes namespaces in every pool of the cluster. Ray must be initialised; blocks.

    Namespaces that are configured no more keep what they hold until somebody else wants it. Raises ConfigError when a
    pool refuses, or would have to copy other namespaces' blocks than before; changes that were accepted before stay.
    """
    devices = {device.name for device in config.devices}
    for pool in find_pools(config.cluster.name):
        try:
            description: PoolDescription = ray.get(pool.describe.remote(), timeout=TIMEOUT_S)
            pool_id = description.binding.pool_id
            device_name = pool_id.rsplit("-", 2)[0]
            if device_name not in devices:
                continue
            wanted = PoolSettings.from_config(config, device_name, node_id="", session_name="")
            _check_replication(description, wanted)
            for command in quota_changes(description.report.namespaces, wanted.quotas):
                answer = ray.get(pool.set_quota.remote(command), timeout=TIMEOUT_S)
                if isinstance(answer, Refused):
                    raise ConfigError(f"pool {pool_id}: {answer.message}")
        except (RayError, TimeoutError) as error:
            logger.warning("a pool keeps its quotas, it does not answer: %s", str(error).partition("\n")[0])


def _check_replication(description: PoolDescription, wanted: PoolSettings) -> None:
    """Raises ConfigError: what a pool copies to other nodes is fixed when it is created."""
    for namespace_id in sorted(each.namespace_id for each in wanted.quotas):
        if (namespace_id in description.replication) != (namespace_id in wanted.replicated):
            present, asked = (2, 1) if namespace_id in description.replication else (1, 2)
            raise ConfigError(
                f"namespaces.{namespace_id}.kv_replicas: {asked} takes pools that start anew, and pool "
                f"{description.binding.pool_id} lives on with {present}; leave it at {present}, or end the platform "
                "(`remora down`, or delete the RayService) and start it with the new configuration"
            )
