"""Finding the pool actors of a cluster, and making them."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from remora.cache_actors.cluster_names import POOL_PREFIX, pool_actor_name, ray_namespace
from remora.cache_actors.device_resources import check_node, pool_gpus
from remora.cache_actors.pool_actor import PoolActor
from remora.cache_actors.pool_settings import PoolSettings
from remora.platform.base.config import RemoraConfig


def get_or_create_pool(config: RemoraConfig, device_name: str, node_id: str) -> Any:
    """Handle of the pool actor of a device on a node; the first caller creates it. Ray must be initialised.

    Raises ConfigError for an unknown device, or a GPU that the node has not; what is wrong with the arena or the quotas
    shows in `await_pool`.
    """
    settings = PoolSettings.from_config(
        config, device_name, node_id=node_id, session_name=ray.get_runtime_context().get_session_name()
    )
    check_node(config, settings.device, node_id)
    return (
        ray.remote(PoolActor)
        .options(
            name=pool_actor_name(device_name, node_id),
            namespace=ray_namespace(config.cluster.name),
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            num_gpus=pool_gpus(settings.device),
            max_concurrency=4096,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(settings)
    )


def find_pools(cluster_name: str) -> list[Any]:
    """Handles of all pool actors of the cluster."""
    namespace = ray_namespace(cluster_name)
    return [
        ray.get_actor(entry["name"], namespace=namespace)
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == namespace and entry["name"].startswith(POOL_PREFIX)
    ]
