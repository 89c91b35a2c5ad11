"""FeedHub: one message a step, eras, heartbeats, nothing sent into the void."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from remora.deployments.engine.messages import (
    FeedMessage,
    FinishReason,
    GenerationRequest,
    LoadReport,
    SamplingParams,
    TokenDelta,
)
from remora.deployments.feed import FeedHub
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, ReplicaId, RequestId, RouterId

ROUTER = RouterId("r")


def delta(request: str = "q", index: int = 0, reason: FinishReason | None = None, choice: int = 0) -> TokenDelta:
    return TokenDelta(
        request_id=RequestId(request), choice_index=choice, epoch=Epoch(0), first_token_index=index, token_ids=(index,),
        text="x", finish_reason=reason,
    )  # fmt: skip


def request(name: str = "q", num_choices: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name), router_id=ROUTER, model_id=ModelId("m"), namespace_id=NamespaceId("n"),
        prompt_token_ids=(1,), block_hashes=(), sampling=SamplingParams(), num_choices=num_choices,
    )  # fmt: skip


class Hub:
    def __init__(self, heartbeat_s: float = 5.0, max_router_silence_s: float = 60.0) -> None:
        self.abandoned: list[tuple[RequestId, ...]] = []
        self.hub = FeedHub(
            ReplicaId("a"),
            on_abandoned=lambda ids: self.abandoned.append(tuple(ids)),
            load=lambda: LoadReport(load_tokens=7),
            heartbeat_s=heartbeat_s,
            max_router_silence_s=max_router_silence_s,
        )


async def opened(hub: FeedHub) -> AsyncIterator[FeedMessage]:
    feed = hub.messages(ROUTER)
    first = await anext(feed)
    assert (first.message_no, first.deltas, first.load.load_tokens) == (0, (), 7)
    return feed


async def test_what_another_thread_emits_in_one_step_leaves_in_one_message() -> None:
    made = Hub()
    feed = await opened(made.hub)
    threading.Thread(target=made.hub.emit, args=(ROUTER, (delta(index=0), delta("p", index=4)))).start()
    message = await anext(feed)
    assert [each.request_id for each in message.deltas] == ["q", "p"]
    assert message.message_no == 1


async def test_what_is_held_back_of_many_streams_leaves_in_time() -> None:
    made = Hub()
    feed = await opened(made.hub)
    for name in range(40):
        made.hub.take(request(f"q{name}"))
        made.hub.emit(ROUTER, (delta(f"q{name}"),))
    assert len((await anext(feed)).deltas) == 40
    made.hub.emit(ROUTER, (delta("q1", 1),))
    made.hub.emit(ROUTER, (delta("q1", 2),))
    await asyncio.sleep(0)
    made.hub.check_integrity()
    async with asyncio.timeout(1):
        message = await anext(feed)
    assert [each.token_ids for each in message.deltas] == [(1, 2)]


async def test_a_slow_reader_gets_several_steps_at_once_in_order() -> None:
    made = Hub()
    feed = await opened(made.hub)
    for index in range(50):
        made.hub.emit(ROUTER, (delta(index=index),))
    await asyncio.sleep(0.01)
    message = await anext(feed)
    assert [each.first_token_index for each in message.deltas] == list(range(50))
    made.hub.check_integrity()


async def test_a_silent_feed_sends_heartbeats() -> None:
    made = Hub(heartbeat_s=0.01)
    feed = await opened(made.hub)
    numbers = [(await anext(feed)).message_no for _ in range(3)]
    assert numbers == [1, 2, 3]


async def test_closing_a_feed_abandons_what_has_not_ended() -> None:
    made = Hub()
    feed = await opened(made.hub)
    for name in ("ended", "open", "dropped"):
        made.hub.take(request(name))
    made.hub.take(request("half", num_choices=2))
    made.hub.take(request("failed", num_choices=2))
    deltas = delta("ended", 0, "stop"), delta("half", 0, "length", 1), delta("failed", 0, "error")
    made.hub.emit(ROUTER, deltas)
    made.hub.drop(RequestId("dropped"))
    await anext(feed)
    await feed.aclose()  # type: ignore[attr-defined]
    assert made.abandoned == [("open", "half")]
    with pytest.raises(Unavailable):
        made.hub.take(request())


async def test_a_new_feed_of_a_router_ends_the_old_one_and_its_requests() -> None:
    made = Hub()
    old = await opened(made.hub)
    made.hub.take(request("before"))
    new = await opened(made.hub)
    assert made.abandoned == [("before",)]
    made.hub.take(request("after"))
    with pytest.raises(StopAsyncIteration):
        await anext(old)
    made.hub.emit(ROUTER, (delta("after"),))
    assert len((await anext(new)).deltas) == 1
    assert made.abandoned == [("before",)]


async def test_the_feed_of_a_router_that_says_nothing_ends_although_something_reads_it() -> None:
    """What carries a feed may read on for a router that was killed."""
    made = Hub(heartbeat_s=0.01, max_router_silence_s=0.1)
    feed = await opened(made.hub)
    made.hub.take(request())
    async with asyncio.timeout(5):
        async for _ in feed:
            made.hub.emit(ROUTER, (delta(),))
    assert made.abandoned == [("q",)]
    assert made.hub.num_open() == 0


async def test_the_feed_of_a_silent_router_ends_although_nothing_reads_it() -> None:
    made = Hub(max_router_silence_s=0.05)
    _kept = await opened(made.hub)
    made.hub.take(request())
    async with asyncio.timeout(5):
        while made.hub.num_open():
            await asyncio.sleep(0.01)
    assert made.abandoned == [("q",)]


async def test_a_router_that_is_heard_keeps_its_feed() -> None:
    made = Hub(max_router_silence_s=0.2)
    _kept = await opened(made.hub)
    for _ in range(20):
        made.hub.hear(ROUTER)
        await asyncio.sleep(0.02)
    assert made.hub.num_open() == 1
    made.hub.hear(RouterId("unknown"))


async def test_deltas_for_nobody_are_dropped() -> None:
    made = Hub()
    made.hub.emit(RouterId("gone"), (delta(),))
    await asyncio.sleep(0.01)
    made.hub.check_integrity()
    assert made.hub.num_open() == 0


async def test_a_reader_waiting_for_a_message_ends_with_the_hub() -> None:
    made = Hub()
    feed = await opened(made.hub)
    waiting: Any = asyncio.ensure_future(anext(feed, None))
    await asyncio.sleep(0.01)
    made.hub.close_all()
    assert await waiting is None
