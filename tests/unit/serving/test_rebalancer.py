"""The router moves requests by itself, between fake replicas: what is seen of it, and what is left alone."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from remora.cache_actors.pool_messages import PoolBinding, PoolDescription
from remora.deployments.engine.messages import SamplingParams
from remora.deployments.generation_job import GenerationJob
from remora.deployments.rebalancer import Rebalancer
from remora.namespaces.report import NamespaceReport, PoolReport
from remora.platform.base.ids import ModelId, NamespaceId, PoolId, ReplicaId, RequestId
from remora.platform.base.rebalance_config import RebalanceConfig

CONFIG = RebalanceConfig(patience_s=0, settle_s=0, min_gap_tokens=100)


def job(name: str, num_tokens: int, max_tokens: int = 40) -> GenerationJob:
    return GenerationJob(
        request_id=RequestId(name), model_id=ModelId("tiny"), namespace_id=NamespaceId("chat"),
        prompt_token_ids=tuple(range(num_tokens)), sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        target=ReplicaId("a"),
    )  # fmt: skip


class Pools:
    def __init__(self) -> None:
        self.described: dict[str, PoolDescription] = {}

    async def __call__(self) -> dict[str, PoolDescription]:
        return self.described


@pytest.fixture
async def two(cluster: Any, make_replica: Any) -> Any:
    """Replicas of two pools; whatever is opened runs at the first."""
    replicas = make_replica("a", pool="p"), make_replica("b", pool="q")
    await cluster.add(*replicas)
    return replicas


async def heard(cluster: Any, *replicas: Any) -> None:
    """The router has what the replicas say of themselves now."""
    for replica in replicas:
        connection = cluster.core.fleet.connection(replica.replica_id)
        await cluster.settle(lambda c=connection, r=replica: c.reported == r.load())


async def open_all(cluster: Any, replica: Any, *jobs: GenerationJob) -> list[Any]:
    streams = [await cluster.core.open(each) for each in jobs]
    await cluster.settle(lambda: len(replica.running) == len(jobs))
    return streams


async def read(stream: Any) -> list[int]:
    tokens: list[int] = []
    while deltas := await stream.next_deltas():
        tokens += [token for delta in deltas for token in delta.token_ids]
    stream.close()
    return tokens


async def test_a_running_request_goes_to_the_idle_device_and_its_text_goes_on(
    cluster: Any, two: Any, expected_token: Any
) -> None:
    a, b = two
    streams = await open_all(cluster, a, job("q1", 60), job("q2", 70), job("q3", 150))
    await a.step(3)
    await heard(cluster, a, b)
    rebalancer = Rebalancer(cluster.core, CONFIG, Pools())
    looking = asyncio.create_task(rebalancer.look())
    # The target computes what there is so far, then the request begins there.
    for _ in range(400):
        await b.step()
        if looking.done():
            break
    ((request_id, target, cause),) = await looking
    assert (request_id, target, cause) == ("q2", "b", "load")
    assert [stream.replica_id for stream in streams] == ["a", "b", "a"]
    value = cluster.core.stats.registry.get_sample_value
    labels = {"model": "tiny", "reason": "load"}
    assert value("remora_router_moved_requests_total", labels) == 1
    assert value("remora_migration_pause_seconds_count", labels) == 1
    for _ in range(40):
        await a.step()
        await b.step()
    request = streams[1].request
    assert await read(streams[1]) == [expected_token(request, 0, position) for position in range(40)]
    for stream in streams:
        stream.close()


async def test_what_has_not_begun_is_moved_first_and_without_a_pause(cluster: Any, two: Any) -> None:
    a, b = two
    streams = await open_all(cluster, a, job("q1", 190), job("q2", 70), job("q3", 20))
    await heard(cluster, a, b)
    decisions = await Rebalancer(cluster.core, CONFIG, Pools()).look()
    assert [(each.request_id, each.target) for each in decisions] == [("q2", "b")]
    await cluster.settle(lambda: len(b.running) == 1)
    assert len(a.running) == 2
    value = cluster.core.stats.registry.get_sample_value
    labels = {"model": "tiny", "reason": "load"}
    assert value("remora_router_moved_requests_total", labels) == 1
    assert not value("remora_migration_pause_seconds_count", labels)
    for stream in streams:
        stream.close()


def described(free_blocks: int) -> PoolDescription:
    """A pool whose namespace may hold so many more blocks of 256 bytes."""
    used = 64 * 1024
    namespace = NamespaceReport(
        namespace_id=NamespaceId("chat"), model_id=ModelId("tiny"), tenant="", share_group="", guaranteed_bytes=0,
        limit_bytes=used + 256 * free_blocks, weight=1.0, used_bytes=used, cached_bytes=1 << 20, borrowed_bytes=0,
        num_running=1, num_waiting=0, num_admitted=1, num_preempted=0, lookup_tokens=0, hit_tokens=0,
        evicted_blocks={},
    )  # fmt: skip
    report = PoolReport(
        data_bytes=1 << 30, extent_bytes=1 << 20, incarnation=1, num_extents=1, num_unleased_extents=0,
        used_bytes=used, cached_bytes=1 << 20, reservable_bytes=0, reserved_bytes=0, num_referenced_blocks=0,
        num_preempting=0, namespaces=(namespace,), geometries=(), leases=(),
    )  # fmt: skip
    binding = PoolBinding(
        pool_id=PoolId("q"), kind="cpu", arena_path="", incarnation=1, backing="shm", outcome="created",
        step_lock_path="",
    )  # fmt: skip
    return PoolDescription(binding=binding, report=report, silent_s={}, num_restarts=0, journal_bytes=0, pid=1)


@pytest.mark.parametrize(("block_bytes", "needed_blocks"), [(256, 20), (128, 10)])
async def test_requests_that_wait_for_memory_go_where_the_pool_says_there_is_some(
    cluster: Any, two: Any, block_bytes: int, needed_blocks: int
) -> None:
    a, b = two
    if block_bytes == 128:
        for replica in two:
            await replica.prepare_precision(NamespaceId("chat"), ("int8", "int8"))
            await replica.refresh_namespaces()
    await cluster.settle(
        lambda: all(
            each.card.of(NamespaceId("chat")).block_bytes == block_bytes for each in cluster.core.fleet.connections()
        )
    )
    a.parked_tokens = 40
    (stream,) = await open_all(cluster, a, job("q1", 40))
    await heard(cluster, a, b)
    pools = Pools()
    rebalancer = Rebalancer(cluster.core, RebalanceConfig(patience_s=0), pools)
    pools.described = {"q": described(free_blocks=needed_blocks - 1)}
    assert await rebalancer.look() == []
    pools.described = {"q": described(free_blocks=needed_blocks)}
    assert [(each.target, each.cause) for each in await rebalancer.look()] == [("b", "memory")]
    await cluster.settle(lambda: len(b.running) == 1)
    stream.close()


async def test_short_requests_and_draining_replicas_are_left_alone(cluster: Any, two: Any) -> None:
    a, b = two
    streams = await open_all(cluster, a, job("q1", 190, max_tokens=16), job("q2", 190, max_tokens=1))
    await heard(cluster, a, b)
    rebalancer = Rebalancer(cluster.core, CONFIG, Pools())
    assert await rebalancer.look() == []
    streams += [await cluster.core.open(job("q3", 20))]
    cluster.publish(draining=[b.replica_id])
    await cluster.settle(lambda: len(a.running) == 3)
    assert await rebalancer.look() == []
    for stream in streams:
        stream.close()


async def test_what_was_just_moved_by_hand_is_left_alone(cluster: Any, two: Any) -> None:
    a, b = two
    (stream,) = await open_all(cluster, b, dataclasses.replace(job("q1", 190), target=b.replica_id))
    cluster.core.move(stream, a.replica_id)
    a.waiting_tokens = 1000
    await cluster.settle(lambda: bool(a.running))
    await a.step()
    await cluster.settle(lambda: not stream.is_landing)
    await heard(cluster, a, b)
    assert await Rebalancer(cluster.core, CONFIG, Pools()).look() == []
    lenient = CONFIG.model_copy(update={"cooldown_s": 0.0})
    looking = asyncio.create_task(Rebalancer(cluster.core, lenient, Pools()).look())
    for _ in range(400):
        await b.step()
        if looking.done():
            break
    assert [each.target for each in await looking] == ["b"]
    stream.close()


async def test_it_looks_by_itself_unless_it_is_switched_off(cluster: Any, two: Any) -> None:
    a, b = two
    streams = await open_all(cluster, a, job("q1", 190), job("q2", 70), job("q3", 20))
    await heard(cluster, a, b)
    quick = {**CONFIG.model_dump(), "interval_s": 0.05}
    off = Rebalancer(cluster.core, RebalanceConfig(**{**quick, "enabled": False}), Pools())
    off.start()
    await asyncio.sleep(0.15)
    assert not b.running
    rebalancer = Rebalancer(cluster.core, RebalanceConfig(**quick), Pools())
    rebalancer.start()
    await cluster.settle(lambda: bool(b.running))
    await rebalancer.stop()
    await off.stop()
    for stream in streams:
        stream.close()
