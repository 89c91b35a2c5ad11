"""What Ray is asked for, so that processes land on nodes that have their devices.

A node has a device of kind cuda when it has a GPU for it, and one with a `node_resource` when it offers this resource
of Ray. A pool holds its GPU; what computes there asks for a trifle of one, and sees the GPU of its pool (`select_gpu`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final

import ray

from remora.cache_actors.cluster_names import pool_actor_name, ray_namespace
from remora.platform.base.config import DeviceConfig, RemoraConfig
from remora.platform.base.errors import ArenaError, ConfigError

#: Ray counts CPUs to place processes; what they really use is bounded by the step lock of their device.
_PROCESS_CPUS: Final = 0.01
#: Of each GPU. No two pools fit on one; the rest is for processes that compute there.
_POOL_GPUS: Final = 0.9
_PROCESS_GPUS: Final = 0.0005
#: Of what marks the nodes of a device, for one on which the process may not compute after all.
_TRIFLE: Final = 0.001


def process_resources(devices: Iterable[DeviceConfig]) -> dict[str, float]:
    """A bundle of a placement group for a process that computes on one of these devices of its node; it counts as one
    process of the first."""
    resources = {"CPU": _PROCESS_CPUS}
    for index, device in enumerate(devices):
        if device.kind == "cuda":
            resources["GPU"] = _PROCESS_GPUS
        if device.node_resource is not None:
            resources.setdefault(device.node_resource, _TRIFLE if index else 1.0)
    return resources


def actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """The same as options of an actor."""
    others = dict(resources)
    return {"num_cpus": others.pop("CPU", 0.0), "num_gpus": others.pop("GPU", 0.0), "resources": others}


def placement_strategy(devices: Iterable[DeviceConfig]) -> str:
    """Of the bundles of a pipeline's stages: on one node, unless devices say which nodes have them."""
    return "STRICT_PACK" if all(device.node_resource is None for device in devices) else "PACK"


def pool_gpus(device: DeviceConfig) -> float:
    """GPUs that the pool of a device holds."""
    return _POOL_GPUS if device.kind == "cuda" else 0.0


def check_node(config: RemoraConfig, device: DeviceConfig, node_id: str) -> None:
    """Raises ConfigError when the node has not so many GPUs that one is left for the device's pool."""
    if device.kind != "cuda":
        return
    num_gpus = next((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == node_id), 0)
    namespace = ray_namespace(config.cluster.name)
    named = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == namespace}
    taken = [
        other.name
        for other in config.devices
        if other.kind == "cuda" and other.name != device.name and pool_actor_name(other.name, node_id) in named
    ]
    if len(taken) >= num_gpus:
        whose = f", taken by {taken}" if taken else ""
        raise ConfigError(
            f"devices.{device.name}: is of kind cuda, and node {node_id[:8]} has {num_gpus} GPUs{whose}; give the "
            "device a node_resource that only nodes with a GPU for it offer, or the node GPUs (ray start --num-gpus)"
        )


def select_gpu(device_uuid: str) -> None:
    """Makes the GPU of a pool (PoolBinding.device_uuid) the one that this process sees; "" changes nothing.

    Before anything here uses CUDA; raises ArenaError when it is too late.
    """
    if not device_uuid or os.environ.get("CUDA_VISIBLE_DEVICES") == device_uuid:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ArenaError(f"this process uses a GPU already, and cannot change to {device_uuid}")
    os.environ["CUDA_VISIBLE_DEVICES"] = device_uuid
