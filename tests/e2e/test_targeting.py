"""ServeLink, LinkedReplica and TargetedRequestRouter on real Serve replicas that only say who they are."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from remora.deployments.engine.messages import FeedMessage
from remora.deployments.linked_replica import LinkedReplica
from remora.deployments.model_card import ModelCard
from remora.deployments.serve_link import ServeLink
from remora.platform.base.errors import Conflict, ReplicaLeaving, Unavailable
from remora.platform.base.ids import ModelId, PoolId, ReplicaId, RequestId, RouterId

pytestmark = pytest.mark.e2e

APP = "targeting"


class Echo:
    """Answers like a ModelReplica, without a model."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        from ray import serve

        from remora.deployments.engine.messages import LoadReport
        from remora.deployments.feed import FeedHub
        from remora.deployments.router_links import RouterLinks

        self.id = serve.get_replica_context().replica_id.unique_id
        self.hub = FeedHub(
            ReplicaId(self.id), on_abandoned=lambda requests: None, load=LoadReport, card_no=lambda: self.num_linked
        )
        self.links = RouterLinks(ReplicaId(self.id), self.hub, self)
        self.num_linked = 0

    async def describe(self, *, target: str) -> bytes:
        card = ModelCard(
            replica_id=ReplicaId(self.id), model_id=ModelId("echo"), pool_id=PoolId("p"), fingerprint=b"",
            block_tokens=1, block_bytes=64,
            max_model_len=1, vocab_size=1, max_num_seqs=1, decoder="", weights="", pid=os.getpid(),
        )  # fmt: skip
        return msgspec.msgpack.encode(card)

    async def feed(self, router_id: str, *, target: str) -> AsyncIterator[bytes]:
        for number in range(10**6):
            message = FeedMessage(replica_id=ReplicaId(self.id), message_no=number, deltas=())
            yield msgspec.msgpack.encode(message)
            await asyncio.sleep(0.01)

    async def cancel(self, data: bytes, *, target: str = "") -> bytes:
        raise Conflict("not now", field="id")

    async def keep_alive(self, router_id: str, wanted_traces: str) -> bytes:
        """Of this replica only over a link: the number of its card counts them."""
        self.num_linked += 1
        self.hub.wake_all()
        return b""

    async def open_links(self, *, target: str) -> bytes:
        return msgspec.msgpack.encode(self.links.open())

    async def carry_feed(self, router_id: str, *, target: str) -> AsyncIterator[bytes]:
        async for begun in self.links.carry(RouterId(router_id)):
            yield begun

    async def everyone(self, *, target: str = "") -> str:
        return self.id


class Front:
    """The application's ingress, which HAProxy would balance by itself; targeting is for what stands behind it."""

    def __init__(self, echo: Any) -> None:
        self.echo = echo


@pytest.fixture(scope="module")
def handle(platform: Any) -> Iterator[Any]:
    from ray import cloudpickle, serve
    from ray.serve.config import RequestRouterConfig

    from remora.deployments.targeting import TargetedRequestRouter

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    deployment: Any = serve.deployment(
        name="Echo",
        num_replicas=2,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.01},
        request_router_config=RequestRouterConfig(request_router_class=TargetedRequestRouter),
    )(Echo)
    front: Any = serve.deployment(name="Front", ray_actor_options={"num_cpus": 0.01})(Front)
    serve.run(front.bind(deployment.bind()), name=APP, route_prefix=None)
    yield serve.get_deployment_handle("Echo", APP)
    serve.delete(APP)


async def _ids(handle: Any) -> list[ReplicaId]:
    return sorted(ReplicaId(each) for each in await asyncio.wrap_future(_broadcast(handle)))


def _broadcast(handle: Any) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1).submit(lambda: handle.broadcast("everyone").results(timeout_s=10))


async def test_calls_and_feeds_reach_the_replica_they_name(handle: Any) -> None:
    ids = await _ids(handle)
    assert len(ids) == 2
    links = {each: ServeLink(handle, each) for each in ids}
    answers = await asyncio.gather(*(links[each].describe() for each in ids * 20))
    assert [answer.replica_id for answer in answers] == ids * 20
    for each in ids:
        feed = links[each].feed(RouterId("r"))
        assert [(await anext(feed)).replica_id for _ in range(5)] == [each] * 5
        await feed.aclose()  # type: ignore[attr-defined]


async def test_a_replica_that_does_not_exist_is_unavailable_at_once(handle: Any) -> None:
    link = ServeLink(handle, ReplicaId("nobody"))
    async with asyncio.timeout(2):
        for _ in range(20):
            with pytest.raises(Unavailable, match="nobody"):
                await link.describe()
        with pytest.raises(Unavailable):
            await anext(link.feed(RouterId("r")))
        # The calls that cannot be placed hold nobody up.
        await ServeLink(handle, (await _ids(handle))[0]).describe()


async def test_errors_of_a_replica_arrive_as_what_they_are(handle: Any) -> None:
    with pytest.raises(Conflict, match="not now"):
        await ServeLink(handle, (await _ids(handle))[0]).cancel([RequestId("q")])


async def test_calls_over_a_link_reach_their_replica_until_serve_does_not_list_it(handle: Any) -> None:
    link, stranger = (LinkedReplica(handle, each) for each in ((await _ids(handle))[0], ReplicaId("nobody")))
    feed = link.feed(RouterId("r"))
    assert (await anext(feed)).card_no == 0
    for number in range(1, 4):
        await link.keep_alive(RouterId("r"))
        assert (await anext(feed)).card_no == number
    with pytest.raises(Conflict, match="not now"):
        await link.cancel([RequestId("q")])
    stranger._link = link._link
    with pytest.raises(ReplicaLeaving, match="nobody"):
        await stranger.keep_alive(RouterId("r"))
    await feed.aclose()


@pytest.mark.parametrize("kind", [ServeLink, LinkedReplica])
async def test_the_death_of_a_replica_ends_its_feed_at_once(handle: Any, kind: type[ServeLink]) -> None:
    async with asyncio.timeout(30):
        while len(ids := await _ids(handle)) < 2:  # one is being replaced
            await asyncio.sleep(0.1)
    dying, other = kind(handle, ids[0]), kind(handle, ids[1])
    feeds = [link.feed(RouterId("r")) for link in (dying, other)]
    for feed in feeds:
        await anext(feed)
    os.kill((await dying.describe()).pid, signal.SIGKILL)

    async def read_on() -> None:
        async for _ in feeds[0]:
            pass

    async with asyncio.timeout(2):
        with pytest.raises(Unavailable):
            await read_on()
        with pytest.raises(Unavailable):
            await dying.describe()
    assert (await anext(feeds[1])).replica_id == ids[1]
    for feed in feeds:
        await feed.aclose()  # type: ignore[attr-defined]
