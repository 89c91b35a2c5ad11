"""RouterCore on replicas behind links: what clients get is the same whatever breaks, and whether there are links."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_replica import FakeReplica
from served_replica import ServedReplica

from remora.cache_actors import loop_link
from remora.cache_actors.loop_link import LoopLink
from remora.deployments import linked_replica
from remora.deployments.engine.messages import SamplingParams
from remora.deployments.generation_job import GenerationJob
from remora.deployments.linked_replica import LinkedReplica
from remora.deployments.replica_connection import ReplicaConnection
from remora.platform.base.errors import ReplicaLeaving, Unavailable
from remora.platform.base.ids import ModelId, NamespaceId, ReplicaId, RequestId, RouterId


def job(name: str, max_tokens: int = 5, *, num_prompt_tokens: int = 3) -> GenerationJob:
    return GenerationJob(
        request_id=RequestId(name),
        model_id=ModelId("tiny"),
        namespace_id=NamespaceId("chat"),
        prompt_token_ids=tuple(index % 200 for index in range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


async def read(stream: Any) -> str:
    text = ""
    while deltas := await stream.next_deltas():
        text += "".join(delta.text for delta in deltas)
    return text


def expected(expected_token: Any, stream: Any) -> str:
    request = stream.request
    return "".join(chr(expected_token(request, 0, position)) for position in range(request.sampling.max_tokens))


@pytest.fixture
def served(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> dict[ReplicaId, ServedReplica]:
    """The cluster's replicas as Serve shows them."""
    monkeypatch.setattr(loop_link, "node_ip", lambda: "127.0.0.1")
    found: dict[ReplicaId, ServedReplica] = {}

    def check_listed(replica_id: ReplicaId) -> None:
        if found[replica_id].replica.leaving:
            raise ReplicaLeaving("it is not listed")

    monkeypatch.setattr(linked_replica, "check_listed", check_listed)

    def connect(replica_id: ReplicaId) -> LinkedReplica:
        if replica_id not in found:
            found[replica_id] = ServedReplica(cluster.replicas[replica_id])
        return LinkedReplica(found[replica_id], replica_id)

    cluster.core.fleet._connect = connect
    return found


async def test_requests_and_tokens_go_over_the_link(
    cluster: Any, served: dict[ReplicaId, ServedReplica], make_replica: Any, expected_token: Any
) -> None:
    replica = make_replica("a")
    await cluster.add(replica)
    stream = await cluster.core.open(job("r1"))
    await cluster.settle(lambda: replica.running)
    await replica.step(5)
    assert await read(stream) == expected(expected_token, stream)
    stopped = await cluster.core.open(job("r2"))
    await cluster.settle(lambda: replica.running)
    stopped.close()
    await cluster.settle(lambda: replica.cancelled == ["r2"])
    assert served[replica.replica_id].served == ["describe", "open_links", "carry_feed"]


@pytest.mark.parametrize("broken", ["replica has none", "cannot be reached", "too large"])
async def test_where_there_is_no_link_everything_goes_through_serve(
    cluster: Any,
    served: dict[ReplicaId, ServedReplica],
    make_replica: Any,
    expected_token: Any,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    replica: FakeReplica = make_replica("a")
    found = served[replica.replica_id] = ServedReplica(replica, has_links=broken != "replica has none")
    if broken == "cannot be reached":
        monkeypatch.setattr(loop_link, "node_ip", lambda: "192.0.2.1")
    if broken == "too large":
        monkeypatch.setattr(linked_replica, "MAX_MESSAGE_BYTES", 100)
    await cluster.add(replica)
    stream = await cluster.core.open(job("r1", num_prompt_tokens=100))
    await cluster.settle(lambda: replica.running)
    assert "submit" in found.served
    assert ("feed" in found.served) == (broken != "too large")
    await replica.step(5)
    assert await read(stream) == expected(expected_token, stream)


async def test_a_link_that_breaks_ends_its_feed_and_the_request_goes_on_through_serve(
    cluster: Any,
    served: dict[ReplicaId, ServedReplica],
    make_replica: Any,
    expected_token: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, and not when either side next says that it is there."""
    monkeypatch.setitem(ReplicaConnection.__init__.__kwdefaults__, "keep_alive_s", 60.0)
    replica = make_replica("a", heartbeat_s=60)
    await cluster.add(replica)
    stream = await cluster.core.open(job("r1", 6))
    await cluster.settle(lambda: replica.running)
    await replica.step(3)
    await cluster.settle(lambda: stream.log.num_tokens == 3)
    found = served[replica.replica_id]
    found.break_links()
    await cluster.settle(lambda: "r1~1" in replica.running)
    assert "r1" not in replica.running, "the feed's end has cancelled it"
    assert "feed" in found.served, "a way on which links break is not taken again at once"
    await replica.step(3)
    assert await read(stream) == expected(expected_token, stream)


async def test_nothing_is_lost_or_said_twice_whatever_breaks(
    cluster: Any,
    served: dict[ReplicaId, ServedReplica],
    make_replica: Any,
    expected_token: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linked_replica, "_RETRY_S", 0.0)
    monkeypatch.setattr("remora.deployments.router.MAX_LOST_ATTEMPTS", 1000)
    replicas = [make_replica("a"), make_replica("b")]
    await cluster.add(*replicas)
    chance = random.Random(7)
    streams = [await cluster.core.open(job(f"r{number}", 20)) for number in range(12)]
    reading = asyncio.gather(*(read(stream) for stream in streams))
    async with asyncio.timeout(20):
        while not reading.done():
            for replica in replicas:
                await replica.step()
                replica.hub.check_integrity()
            if chance.random() < 0.15:
                served[chance.choice(replicas).replica_id].break_links()
    assert await reading == [expected(expected_token, stream) for stream in streams]
    assert sum(stream.num_lost for stream in streams) > 5
    await cluster.settle(lambda: not any(replica.running for replica in replicas))


async def test_what_comes_over_a_link_of_an_earlier_feed_is_not_taken(
    cluster: Any, served: dict[ReplicaId, ServedReplica], make_replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_link, "node_ip", lambda: "127.0.0.1")
    replica = make_replica("a", heartbeat_s=60)
    found = served[replica.replica_id] = ServedReplica(replica)
    old, new = LinkedReplica(found, replica.replica_id), LinkedReplica(found, replica.replica_id)
    feeds = [link.feed(RouterId("router")) for link in (old, new)]
    assert (await anext(feeds[0])).message_no == 0
    early = old._link
    assert early is not None
    keep_alive = (linked_replica.LINKED_CALLS.index("keep_alive"), b"\x91\xa6router")
    await early.ask(*keep_alive)
    await new._join(RouterId("router"), asyncio.Queue())
    with pytest.raises(Unavailable, match="not in use"):
        await early.ask(*keep_alive)
    assert (await anext(feeds[1])).message_no == 0
    with pytest.raises(Unavailable):
        await anext(feeds[0])
    await new.keep_alive(RouterId("router"))
    replica.hub.wake_all()
    assert (await anext(feeds[1])).message_no == 1, "the end of the old link is not the end of the new feed"
    for feed in feeds:
        await feed.aclose()


async def test_the_end_of_a_feed_closes_its_link_whatever_the_router_does(
    cluster: Any, served: dict[ReplicaId, ServedReplica], make_replica: Any
) -> None:
    replica = make_replica("a")
    links = ServedReplica(replica).links
    address, silent = links.open(), LoopLink()
    assert address is not None
    await loop_link.connect_link(address, silent)
    await silent.ask(linked_replica.JOIN, b"router")

    async def carry() -> int:
        return len([begun async for begun in links.carry(RouterId("router"))])

    carrying = asyncio.create_task(carry())
    await cluster.settle(lambda: replica.hub.num_open() == 1)
    replica.hub.close(RouterId("router"))
    assert await carrying == 1
    await cluster.settle(lambda: silent.has_ended and not links.peers)


async def test_a_replica_that_serve_does_not_list_any_more_is_told_nothing_over_its_link(
    cluster: Any, served: dict[ReplicaId, ServedReplica], make_replica: Any, expected_token: Any
) -> None:
    leaving, other = make_replica("a"), make_replica("b")
    await cluster.add(leaving)
    stream = await cluster.core.open(job("r1", 4))
    await cluster.settle(lambda: leaving.running)
    leaving.leaving = True
    behind = await cluster.core.open(job("r2", 4))
    await cluster.settle(lambda: cluster.core.num_waiting == 1)
    assert [request.request_id for request in leaving.submitted] == ["r1"]
    await leaving.step(4)
    assert await read(stream) == expected(expected_token, stream), "its feed goes on"
    await cluster.add(other)
    await cluster.settle(lambda: other.running)
    await other.step(4)
    assert await read(behind) == expected(expected_token, behind)


async def test_a_router_that_goes_away_leaves_nothing_running_and_no_link(
    served: dict[ReplicaId, ServedReplica], make_replica: Callable[..., FakeReplica], cluster: Any
) -> None:
    replica = make_replica("a")
    await cluster.add(replica)
    await cluster.core.open(job("r1", 50))
    await cluster.settle(lambda: replica.running)
    links = served[replica.replica_id].links
    assert links.peers
    await cluster.core.stop()
    await cluster.settle(lambda: not replica.running and not links.peers and not replica.hub.num_open())
