"""Under which names the named actors of a cluster live."""

from __future__ import annotations

from typing import Final

#: Name of the registry actor.
REGISTRY_NAME: Final = "registry"
#: Names of pool actors begin with it.
POOL_PREFIX: Final = "pool-"


def ray_namespace(cluster_name: str) -> str:
    """Ray namespace of the cluster's named actors."""
    return f"remora-{cluster_name}"


def pool_actor_name(device_name: str, node_id: str) -> str:
    """Name, in the cluster's Ray namespace, of the pool actor of a device."""
    return f"{POOL_PREFIX}{device_name}-{node_id}"


def is_on_node(pool_actor: str, node_id: str) -> bool:
    """Whether the pool actor of that name is on the node."""
    return pool_actor.endswith(f"-{node_id}")
