"""The registry as a real actor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import ray

from remora.cache_actors.process_watch import process_identity
from remora.cache_actors.registry import get_or_create_registry
from remora.cache_actors.registry_client import RegistryMember, ReplicaDirectory
from remora.cache_actors.registry_state import ReplicaLoad, ReplicaRecord
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base.config import ClusterConfig
from remora.platform.base.ids import ModelId, NamespaceId, PoolId, ReplicaId

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
BEAT_S = 0.1
SETTLE_S = 4.0


@pytest.fixture
async def registry() -> AsyncIterator[Any]:
    handle = get_or_create_registry(
        ClusterConfig(name=f"t{uuid.uuid4().hex[:8]}"), heartbeat_s=BEAT_S, settle_s=SETTLE_S
    )
    yield handle
    ray.kill(handle)


def record(name: str, pid: int | None = None) -> ReplicaRecord:
    return ReplicaRecord(
        replica_id=ReplicaId(name),
        model_id=ModelId("m"),
        namespace_ids=(NamespaceId("m"),),
        node_id=ray.get_runtime_context().get_node_id(),
        pool_id=PoolId("pool"),
        process=process_identity(pid),
        endpoint="e",
        fingerprint=b"f",
        geometry=KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=16),
        max_model_len=128,
    )


async def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.02)


def member(registry: Any, name: str, loads: dict[str, int]) -> RegistryMember:
    return RegistryMember(
        registry, record(name), lambda: ("ready", ReplicaLoad(num_running=loads[name])), heartbeat_s=BEAT_S
    )


async def test_routers_see_replicas_come_change_and_go(registry: Any) -> None:
    changes: list[int] = []
    directory = ReplicaDirectory(registry, lambda: changes.append(1))
    await directory.start()
    assert directory.replicas() == ()
    loads = {"a": 1, "b": 2}
    members = [member(registry, name, loads) for name in loads]
    for one in members:
        await one.start()
    await eventually(lambda: [r.load.num_running for r in directory.replicas(ModelId("m"))] == [1, 2])
    assert directory.replicas()[0].status == "ready"
    loads["b"] = 9
    await eventually(lambda: [r.load.num_running for r in directory.replicas()] == [1, 9])
    await members[0].stop()
    await eventually(lambda: [r.replica_id for r in directory.replicas()] == ["b"])
    await directory.report_dead(ReplicaId("b"), "seen dead")
    await eventually(lambda: directory.replicas() == () or directory.replicas()[0].load.num_running == 9)
    # It lives, so it comes back.
    await eventually(lambda: [r.replica_id for r in directory.replicas()] == ["b"])
    assert changes
    await members[1].stop()
    await directory.stop()


async def test_after_a_crash_of_the_registry_everybody_is_back_and_routers_never_saw_less(registry: Any) -> None:
    directory = ReplicaDirectory(registry)
    loads = {"a": 1, "b": 2}
    members = [member(registry, name, loads) for name in loads]
    for one in members:
        await one.start()
    await directory.start()
    await eventually(lambda: len(directory.replicas()) == 2)
    smallest = 2

    async def watch() -> None:
        nonlocal smallest
        while True:
            smallest = min(smallest, len(directory.replicas()))
            await asyncio.sleep(0.005)

    watcher = asyncio.create_task(watch())
    pid = await registry.pid.remote()
    os.kill(pid, signal.SIGKILL)
    loads["a"] = 5
    await eventually(lambda: directory.replicas()[0].load.num_running == 5, timeout_s=30)
    assert len(await registry.replicas.remote()) == 2
    assert await registry.pid.remote() != pid
    watcher.cancel()
    assert smallest == 2
    await asyncio.sleep(SETTLE_S)
    assert len(directory.replicas()) == 2
    for one in members:
        await one.stop()
    await directory.stop()


async def test_a_replica_whose_process_died_leaves_the_directory_by_itself(registry: Any) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead, silent = record("dead", process.pid), record("silent")
    await registry.register.remote(dead)
    await registry.register.remote(silent)
    process.kill()
    process.wait()
    directory = ReplicaDirectory(registry)
    await directory.start()
    await eventually(
        lambda: directory.replicas() == (msgspec.structs.replace(silent, status="lost"),)
    )  # a living process that does not answer is not thrown out at once
    assert await registry.heartbeat.remote(silent.replica_id, "ready", ReplicaLoad())
    assert not await registry.heartbeat.remote(dead.replica_id, "ready", ReplicaLoad())
    await registry.check_integrity.remote()
    await directory.stop()


async def test_there_is_one_registry_per_cluster_name(registry: Any) -> None:
    config = ClusterConfig(name=f"t{uuid.uuid4().hex[:8]}")
    first, second = get_or_create_registry(config), get_or_create_registry(config)
    assert await first.pid.remote() == await second.pid.remote()
    assert await first.pid.remote() != await registry.pid.remote()
    ray.kill(first)
