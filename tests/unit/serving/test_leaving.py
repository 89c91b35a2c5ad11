"""Replicas that Serve stops (scale-down, a rolling update): their requests go elsewhere, and nobody loses anything."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any

from tests.unit.serving.test_router import job, read, text

from remora.deployments.replica_connection import ReplicaConnection
from remora.deployments.router import MAX_LOST_ATTEMPTS
from remora.platform.base.ids import ReplicaId, RouterId


async def opened(cluster: Any, replica: Any, name: str = "q", **options: Any) -> Any:
    """A request at the replica."""
    made = dataclasses.replace(job(**options), request_id=name, target=replica.replica_id)
    stream = await cluster.core.open(made)
    await cluster.settle(lambda: stream.replica_id == replica.replica_id and stream.attempt_id in replica.running)
    return stream


async def leave(cluster: Any, replica: Any) -> None:
    """Serve stops the replica; the router learns it from the first call that does not arrive."""
    replica.leaving = True
    late = await cluster.core.open(dataclasses.replace(job(), request_id=f"late-{replica.replica_id}",
                                                       target=replica.replica_id))  # fmt: skip
    await cluster.settle(lambda: cluster.core.fleet.connection(replica.replica_id).leaving)
    late.close()


def resumed(cluster: Any, reason: str) -> float:
    labels = {"model": "tiny", "reason": reason}
    value = cluster.core.stats.registry.get_sample_value("remora_router_resumed_requests_total", labels)
    return float(value or 0)


async def test_requests_leave_a_stopping_replica_without_a_gap_and_what_it_never_had_runs_elsewhere(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    a, b = make_replica("a"), make_replica("b")
    await cluster.add(a, b)
    stream = await opened(cluster, a, max_tokens=8)
    await a.step(3)
    await cluster.settle(lambda: stream.log.num_tokens == 3)
    a.leaving = True
    late = await cluster.core.open(dataclasses.replace(job(max_tokens=8), request_id="late", target=a.replica_id))
    await cluster.settle(lambda: len(b.running) == 2)
    for _ in range(10):
        await a.step()  # it does not know yet that nobody listens
        await b.step()
    assert await read(stream) == [text(expected_token, stream)]
    assert await read(late) == [text(expected_token, late)]
    assert (stream.num_lost, late.num_lost) == (0, 0)
    assert (resumed(cluster, "replica_lost"), resumed(cluster, "unavailable")) == (0, 1)
    await cluster.settle(lambda: not cluster.core.fleet.connection(a.replica_id).connected)
    assert a.hub.num_open() == 0, "so that the replica can end at once"


async def test_an_update_of_more_replicas_than_a_request_may_lose_does_not_end_it(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    replicas = [make_replica(f"r{i}") for i in range(MAX_LOST_ATTEMPTS + 3)]
    await cluster.add(replicas[0])
    stream = await opened(cluster, replicas[0], max_tokens=20)
    for old, new in itertools.pairwise(replicas):
        await old.step(2)
        await cluster.add(new)
        await leave(cluster, old)
        await cluster.settle(lambda at=new: stream.replica_id == at.replica_id and bool(at.running))
        cluster.remove(old)
    await replicas[-1].step(20)
    assert await read(stream) == [text(expected_token, stream)]


async def test_without_another_replica_the_stopping_one_goes_on_until_a_new_one_is_there(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    a, b = make_replica("a"), make_replica("b")
    await cluster.add(a)
    stream = await opened(cluster, a, max_tokens=8)
    await leave(cluster, a)
    await a.step(3)
    await cluster.settle(lambda: stream.log.num_tokens == 3)
    assert stream.replica_id == a.replica_id
    await cluster.add(b)
    await cluster.settle(lambda: bool(b.running))
    await b.step(8)
    assert await read(stream) == [text(expected_token, stream)]


class Owner:
    def __init__(self) -> None:
        self.num_connected = self.num_left = 0

    def on_connected(self, connection: ReplicaConnection) -> None:
        self.num_connected += 1

    def on_message(self, connection: ReplicaConnection, message: Any) -> None:
        pass

    def on_leaving(self, connection: ReplicaConnection, unsent: Any) -> None:
        self.num_left += 1

    def on_lost(self, connection: ReplicaConnection, reason: str) -> None:
        raise AssertionError(reason)


async def test_a_replica_that_serve_lists_again_takes_requests_again(make_replica: Any, cluster: Any) -> None:
    replica, owner = make_replica("a"), Owner()
    connection = ReplicaConnection(ReplicaId("a"), replica, RouterId("r"), owner, keep_alive_s=0.01)
    connection.own_load_tokens = 1
    task = asyncio.create_task(connection.run())
    await cluster.settle(lambda: connection.connected)
    replica.leaving = True
    await cluster.settle(lambda: connection.leaving)
    replica.leaving = False
    await cluster.settle(lambda: not connection.leaving)
    assert connection.connected
    assert owner.num_left
    assert owner.num_connected == 2, "what waits is told that there is a replica again"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
