"""Stages, replicas and pools of GPUs land on nodes that have them, also where the GPUs are only said to be there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.cluster.nodes.extra_nodes import ExtraNodes

from remora.cache_actors.cluster_names import pool_actor_name, ray_namespace
from remora.cache_actors.device_resources import (
    actor_options,
    placement_strategy,
    pool_gpus,
    process_resources,
    select_gpu,
)
from remora.cache_actors.pool_calls import await_pool
from remora.cache_actors.pool_handles import get_or_create_pool
from remora.deployments.pipeline.stage_handle import bundle_node
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import ArenaError, ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

CLUSTER = "gpu-placement"


@pytest.fixture
def config(tmp_path: Path) -> RemoraConfig:
    stages = {"pipeline_stages": 3, "stage_devices": ["gpu0", "cpu0", "gpu1"], "stage_layers": [1, 1, 1]}
    return RemoraConfig.model_validate(
        {
            "cluster": {"name": CLUSTER, "state_dir": str(tmp_path)},
            "devices": [{"name": "gpu0", "kind": "cuda"}, {"name": "gpu1", "kind": "cuda"}, {"name": "cpu0"}],
            "models": [{"name": "m", "source": "x", **stages}],
        }
    )


@pytest.fixture
def gpu_node(tmp_path: Path) -> Iterator[str]:
    nodes = ExtraNodes(tmp_path)
    yield nodes.add(num_gpus=1)
    nodes.close()


class Probe:
    def __init__(self, gpu_uuid: str = "") -> None:
        select_gpu(gpu_uuid)

    def where(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


def test_what_computes_on_a_gpu_goes_where_one_is(config: RemoraConfig, gpu_node: str) -> None:
    gpu0, gpu1, cpu0 = config.devices
    devices = [gpu0, cpu0, gpu1]
    group = ray.util.placement_group([process_resources([each]) for each in devices], placement_strategy(devices))
    ray.get(group.ready(), timeout=30)
    try:
        assert [bundle_node(group, bundle) for bundle in range(3)] == [gpu_node] * 3
    finally:
        ray.util.remove_placement_group(group)
    # As a plain model's replica: beside a pool there is room, and the GPU that it sees is the pool's.
    pool: Any = (
        ray.remote(Probe)
        .options(num_gpus=pool_gpus(gpu0), name=pool_actor_name("gpu0", gpu_node), namespace=ray_namespace(CLUSTER))
        .remote()
    )
    assert ray.get(pool.where.remote(), timeout=30) == (gpu_node, "0")
    replica = ray.remote(Probe).options(**actor_options(process_resources([gpu0]))).remote("GPU-of-the-pool")
    assert ray.get(replica.where.remote(), timeout=30) == (gpu_node, "GPU-of-the-pool")

    own = ray.get_runtime_context().get_node_id()
    with pytest.raises(ConfigError, match=r"devices\.gpu0: is of kind cuda, and node \w+ has 0 GPUs; give the device"):
        get_or_create_pool(config, "gpu0", own)
    with pytest.raises(ConfigError, match=r"devices\.gpu1: .* has 1 GPUs, taken by \['gpu0'\]; give the device"):
        get_or_create_pool(config, "gpu1", gpu_node)
    ray.kill(pool)
    deadline_s = time.monotonic() + 30
    while pool_actor_name("gpu0", gpu_node) in {each["name"] for each in ray.util.list_named_actors(True)}:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    # There are no real ones: the pool is placed, and says what is missing.
    with pytest.raises(ArenaError, match="the pool did not start"):
        asyncio.run(await_pool(get_or_create_pool(config, "gpu1", gpu_node)))
