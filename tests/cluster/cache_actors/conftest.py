"""Pools on a real Ray: a configuration of their own each, removed with every file afterwards."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

sys.path.insert(0, str(Path(__file__).parent))

import replica_probe
from replica_probe import MakePool, MakeProbe, ReplicaProbe, config, node_id

from remora.cache_actors.pool_calls import await_pool
from remora.cache_actors.pool_handles import get_or_create_pool
from remora.cache_actors.stale_files import cluster_files
from remora.platform.base import paths

# Ray's workers do not have this folder on their path.
cloudpickle.register_pickle_by_value(replica_probe)


@pytest.fixture
async def make_pool(ray_cluster: None, tmp_path: Path) -> AsyncIterator[MakePool]:
    """`await make_pool(**sizes)` starts a pool and returns its handle."""
    name = f"t{uuid.uuid4().hex[:8]}"
    pools: list[Any] = []

    async def make(**sizes: int) -> Any:
        pool = get_or_create_pool(config(name, tmp_path, **sizes), "cpu0", node_id())
        await await_pool(pool)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        await pool.check_integrity.remote()
        await pool.retire.remote()
        ray.kill(pool)
    assert cluster_files(name, paths.SHARED_MEMORY_DIR, tmp_path / "state") == []


@pytest.fixture
async def make_probe(ray_cluster: None) -> AsyncIterator[MakeProbe]:
    """`await make_probe(pool, "a")` starts a process that holds a lease for model a."""
    probes: list[Any] = []

    async def make(pool: Any, model: str = "a", num_layers: int = 1) -> Any:
        probe = ray.remote(ReplicaProbe).options(num_cpus=0, max_restarts=0).remote()
        probes.append(probe)
        await probe.attach.remote(pool, model, num_layers)
        return probe

    yield make
    for probe in probes:
        ray.kill(probe)
