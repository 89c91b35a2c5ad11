"""Several routers on the same replicas and sessions: each stream has one, and none is in another's way."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.serving.test_router import job, read, step_until_done, text

from remora.cache_actors.session_registry import SessionRegistry
from remora.deployments.listed import Listed
from remora.deployments.placement import LOAD_BOUND
from remora.deployments.router import RouterCore
from remora.deployments.session_turns import SessionTurns
from remora.namespaces.session_commands import CreateSession, SessionHead, ShowSession
from remora.platform.base.errors import Conflict
from remora.platform.base.ids import ModelId, NamespaceId, ReplicaId, RouterId, SessionId
from remora.platform.base.sql_state_store import SqlStateStore
from remora.platform.base.state_store import default_database_url


@pytest.fixture
async def two_cores(cluster: Any, make_replica: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Both connected to three replicas of three pools."""
    await cluster.add(*(make_replica(name, pool=f"pool-{name}", heartbeat_s=0.01) for name in "abc"))
    second = RouterCore(cluster.core.config, cluster.replicas.__getitem__, router_id=RouterId("router-2"))
    second.update_replicas({key: Listed(each.model_id, "node-1", True) for key, each in cluster.replicas.items()})
    await cluster.settle(lambda: all(each.connected for each in second.fleet.connections()))
    yield cluster.core, second
    second.check_integrity()
    await second.stop()
    assert second.num_open == 0


async def test_requests_of_two_routers_end_each_at_its_own_and_a_dead_router_takes_only_its_own_along(
    cluster: Any, two_cores: Any, expected_token: Any
) -> None:
    streams = {
        (core.router_id, i): await core.open(job(f"{core.router_id}-{i}")) for core in two_cores for i in range(20)
    }
    replicas = list(cluster.replicas.values())
    await cluster.settle(lambda: sum(len(each.running) for each in replicas) == 40)
    await two_cores[1].stop()
    await cluster.settle(lambda: sum(len(each.running) for each in replicas) == 20)
    stepping = asyncio.create_task(step_until_done(*replicas))
    for (router_id, _), stream in streams.items():
        if router_id == two_cores[0].router_id:
            assert await read(stream) == [text(expected_token, stream)]
    stepping.cancel()
    assert not any(each.running for each in replicas)


async def test_load_that_one_router_brings_is_seen_by_the_other(cluster: Any, two_cores: Any) -> None:
    first, second = two_cores
    prompt = tuple(range(100))
    streams = [await first.open(dataclasses.replace(job("big", prompt=prompt), target=ReplicaId("a")))]
    await cluster.settle(lambda: second.fleet.connection(ReplicaId("a")).reported.load_tokens == 100)
    for i in range(12):
        # Prompts that would spread over all three.
        streams.append(await second.open(job(f"q{i}", prompt=(i,) * 8, max_tokens=1)))
    loads = {key: sum(each.load_tokens for each in streams if each.replica_id == key) for key in cluster.replicas}
    mean = sum(loads.values()) / 3
    assert loads["b"] <= LOAD_BOUND * mean + 9
    assert loads["c"] <= LOAD_BOUND * mean + 9
    assert [each.replica_id for each in streams[1:]].count(ReplicaId("a")) == 0
    for stream in streams:
        stream.close()


async def test_a_session_has_one_writer_whichever_router_it_asks(tmp_path: Path) -> None:
    registry = SessionRegistry(lambda: SqlStateStore(default_database_url(tmp_path, "unit")), cluster_id="unit")
    one, two = SessionTurns(registry), SessionTurns(registry)
    session, model = SessionId("s"), ModelId("tiny")
    await registry.call(
        CreateSession(session_id=session, model_id=model, namespace_id=NamespaceId("chat"), call_id="c", max_sessions=9)
    )
    turn = await one.begin(session, model, None)
    with pytest.raises(Conflict):
        await two.begin(session, model, None)
    waiting = asyncio.create_task(two.begin(session, model, None, wait_s=5))
    await asyncio.sleep(0.02)
    await turn.commit("text", (1, 2), (3,), owner=ReplicaId("a"))
    after = await waiting
    assert (after.token_ids, after.state.owner) == ((1, 2, 3), "a")
    assert after.epoch > turn.epoch
    # The first router is restarted: what it had committed is there, and what the other writes goes on.
    await one.stop()
    await after.commit("text", (4,), (5,))
    head = await registry.call(ShowSession(session_id=session))
    assert isinstance(head, SessionHead)
    assert head.num_tokens == 5
    await two.stop()
    await registry.close()
