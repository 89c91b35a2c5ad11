"""RouterCore on fake replicas: streams survive losses, nothing leaks, nothing hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from remora.deployments.engine.messages import SamplingParams
from remora.deployments.generation_job import GenerationJob
from remora.deployments.held_deltas import MAX_HOLD_S
from remora.deployments.router import MAX_LOST_ATTEMPTS
from remora.platform.base.errors import InvalidRequest, OverQuota, Unavailable
from remora.platform.base.ids import ModelId, NamespaceId, RequestId


def job(name: str = "r1", *, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5, n: int = 1, **more: Any) -> Any:
    return GenerationJob(
        request_id=RequestId(name),
        model_id=ModelId("tiny"),
        namespace_id=NamespaceId("chat"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **more),
        num_choices=n,
    )


async def read(stream: Any, n: int = 1) -> list[str]:
    """The whole text of each choice."""
    texts = [""] * n
    while deltas := await stream.next_deltas():
        for delta in deltas:
            texts[delta.choice_index] += delta.text
    return texts


def text(expected_token: Any, stream: Any, index: int = 0) -> str:
    length = stream.request.sampling.max_tokens
    return "".join(chr(expected_token(stream.request, index, position)) for position in range(length))


async def step_until_done(*replicas: Any) -> None:
    while True:
        for replica in replicas:
            if replica.alive:
                await replica.step()
        await asyncio.sleep(0.002)


async def test_a_request_streams_from_a_replica_to_its_end(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    replica = make_replica("a")
    await cluster.add(replica)
    stream = await cluster.core.open(job(n=2))
    await cluster.settle(lambda: replica.running)
    await replica.step(5)
    assert await read(stream, 2) == [text(expected_token, stream, 0), text(expected_token, stream, 1)]
    assert stream.num_cached_tokens == 3  # the fake says 4 of a prompt of 3: never more than the prompt
    assert cluster.core.num_open == 0


async def test_requests_that_arrive_together_are_sent_in_few_calls(cluster: Any, make_replica: Any) -> None:
    replica = make_replica("a")
    await cluster.add(replica)
    streams = [await cluster.core.open(job(f"r{i}")) for i in range(50)]
    await cluster.settle(lambda: len(replica.running) == 50)
    assert replica.num_submit_calls <= 3
    for stream in streams:
        stream.close()
    await cluster.settle(lambda: not replica.running)


async def test_a_lost_replica_continues_elsewhere_behind_what_the_client_has(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    first, second = make_replica("a"), make_replica("b")
    await cluster.add(first, second)
    stream = await cluster.core.open(job(max_tokens=6, n=2))
    await cluster.settle(lambda: first.running or second.running)
    dying, heir = (first, second) if first.running else (second, first)
    await dying.step(3)
    await cluster.settle(lambda: stream.log.num_tokens == 6)
    dying.kill()
    await cluster.settle(lambda: heir.running)
    (resumed,) = heir.submitted
    assert resumed.output_token_ids == stream.log.token_ids()
    assert resumed.epoch == 1
    assert resumed.sampling.seed == dying.submitted[0].sampling.seed is not None
    await heir.step(3)
    assert await read(stream, 2) == [text(expected_token, stream, 0), text(expected_token, stream, 1)]


async def test_a_choice_that_has_ended_is_not_repeated_after_a_failover(cluster: Any, make_replica: Any) -> None:
    first = make_replica("a")
    await cluster.add(first)
    stream = await cluster.core.open(job(max_tokens=3, n=2))
    await cluster.settle(lambda: first.running)
    _request, choices = next(iter(first.running.values()))
    choices[1] = None  # only choice 0 runs
    await first.step(3)
    await cluster.settle(lambda: stream.log.finished_choices() == (0,))
    first.kill()
    second = make_replica("b")
    await cluster.add(second)
    await cluster.settle(lambda: second.running)
    await second.step(4)
    texts = await read(stream, 2)
    assert [len(each) for each in texts] == [3, 3]


async def test_a_request_waits_for_the_restarted_replica(cluster: Any, make_replica: Any, expected_token: Any) -> None:
    first = make_replica("a")
    await cluster.add(first)
    stream = await cluster.core.open(job(max_tokens=4))
    await cluster.settle(lambda: first.running)
    await first.step(2)
    await cluster.settle(lambda: stream.log.num_tokens == 2)
    first.kill()
    await cluster.settle(lambda: cluster.core.num_waiting == 1)
    cluster.core.check_integrity()
    restarted = make_replica("a2")
    await cluster.add(restarted)
    await cluster.settle(lambda: restarted.running)
    await restarted.step(2)
    assert await read(stream) == [text(expected_token, stream)]


async def test_without_any_replica_a_request_is_answered_in_time(cluster: Any, make_replica: Any) -> None:
    with pytest.raises(Unavailable, match="is up yet"):
        await cluster.core.open(job())
    replica = make_replica("a")
    await cluster.add(replica)
    replica.kill()
    await cluster.settle(lambda: not cluster.core.fleet.is_ready(ModelId("tiny")))
    stream = await cluster.core.open(job())
    with pytest.raises(Unavailable, match="came up within"):
        await stream.next_deltas()


async def test_a_request_that_kills_every_replica_is_given_up(cluster: Any, make_replica: Any) -> None:
    replicas = [make_replica(f"r{i}") for i in range(MAX_LOST_ATTEMPTS + 2)]
    await cluster.add(*replicas)
    stream = await cluster.core.open(job())
    for _ in range(MAX_LOST_ATTEMPTS + 1):
        await cluster.settle(lambda: any(replica.running for replica in replicas))
        next(replica for replica in replicas if replica.running).kill()
    with pytest.raises(Unavailable, match="lost under this request"):
        await stream.next_deltas()
    assert sum(replica.alive for replica in replicas) == 1


async def test_a_gap_in_the_deltas_resumes_instead_of_skipping(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    replica = make_replica("a")
    await cluster.add(replica)
    stream = await cluster.core.open(job(max_tokens=6))
    await cluster.settle(lambda: replica.running)
    await replica.step(2)
    replica.drop_next_delta = True
    await replica.step(2)
    await cluster.settle(lambda: len(replica.submitted) == 2)
    assert replica.cancelled == ["r1"]
    assert replica.submitted[1].output_token_ids == stream.log.token_ids()
    await cluster.settle(lambda: replica.running)
    await replica.step(4)
    assert await read(stream) == [text(expected_token, stream)]


async def test_deltas_of_an_old_attempt_and_repeats_are_dropped(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    replica = make_replica("a")
    await cluster.add(replica)
    stream = await cluster.core.open(job(max_tokens=3))
    await cluster.settle(lambda: replica.running)
    await replica.step()
    await cluster.settle(lambda: stream.log.num_tokens == 1)
    (request, _), *_ = replica.running.values()
    stale = replica._delta(request, 0, 1, ord("!"), None)
    replica.hub.emit(request.router_id, (msgspec.structs.replace(stale, epoch=7),))
    replica.hub.emit(request.router_id, (msgspec.structs.replace(stale, first_token_index=0),))
    replica.hub.emit(request.router_id, (msgspec.structs.replace(stale, request_id=RequestId("r1~4")),))
    replica.hub.emit(request.router_id, (msgspec.structs.replace(stale, choice_index=5),))
    await asyncio.sleep(2 * MAX_HOLD_S)  # they leave before what is right comes and is joined to the repeat
    await replica.step(2)
    assert await read(stream) == [text(expected_token, stream)]


async def test_a_frozen_replica_is_left_when_its_feed_falls_silent(
    cluster: Any, make_replica: Any, expected_token: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = make_replica("a")
    await cluster.add(frozen)
    (connection,) = cluster.core.fleet.connections()
    connection._max_silence_s = 0.3
    stream = await cluster.core.open(job(max_tokens=2))
    await cluster.settle(lambda: frozen.running)
    frozen.frozen = True
    second = make_replica("b")
    await cluster.add(second)
    await cluster.settle(lambda: second.running, timeout_s=3)
    await second.step(2)
    assert await read(stream) == [text(expected_token, stream)]
    frozen.frozen = False


async def test_a_closed_stream_stops_generation_wherever_it_is(cluster: Any, make_replica: Any) -> None:
    replica = make_replica("a")
    await cluster.add(replica)
    queued = await cluster.core.open(job("queued"))
    queued.close()  # still in the outbox
    running = await cluster.core.open(job("running"))
    await cluster.settle(lambda: replica.running)
    running.close()
    running.close()
    await cluster.settle(lambda: not replica.running)
    assert replica.cancelled == ["running"]
    assert [request.request_id for request in replica.submitted] == ["running"]
    assert cluster.core.num_open == 0


async def test_engine_errors_arrive_as_what_they_are(cluster: Any, make_replica: Any) -> None:
    replica = make_replica("a")
    await cluster.add(replica)
    replica.error = {"error": "OverQuota", "error_message": "chat is full", "retry_after_s": 7.0}
    stream = await cluster.core.open(job("r1"))
    with pytest.raises(OverQuota, match="chat is full") as caught:
        await stream.next_deltas()
    assert caught.value.retry_after_s == 7.0
    replica.error = {"error": "InvalidRequest", "error_message": "response_format: no such type"}
    stream = await cluster.core.open(job("r2"))
    with pytest.raises(InvalidRequest) as invalid:
        await stream.next_deltas()
    assert invalid.value.field == "response_format"


async def test_a_removed_replica_loses_its_requests_to_the_others(cluster: Any, make_replica: Any) -> None:
    first = make_replica("a")
    await cluster.add(first)
    await cluster.core.open(job())
    await cluster.settle(lambda: first.running)
    second = make_replica("b")
    await cluster.add(second)
    cluster.remove(first)
    await cluster.settle(lambda: second.running)
    await cluster.settle(lambda: not first.running)  # its feed was closed


async def test_two_hundred_requests_half_aborted_under_losses_leave_nothing(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    replicas = [make_replica(f"r{i}") for i in range(3)]
    await cluster.add(*replicas)
    steps = asyncio.create_task(step_until_done(*replicas))

    async def client(i: int) -> None:
        stream = await cluster.core.open(job(f"q{i}", prompt=(i, i + 1, i + 2, i, i), max_tokens=3 + i % 5))
        try:
            if i % 2:
                await stream.next_deltas()
                return
            assert await read(stream) == [text(expected_token, stream)]
        finally:
            stream.close()

    clients = [asyncio.create_task(client(i)) for i in range(200)]
    await asyncio.sleep(0.02)
    replicas[0].kill()
    await asyncio.gather(*clients)
    steps.cancel()
    cluster.core.check_integrity()
    await cluster.settle(lambda: not any(replica.running for replica in replicas))
    assert cluster.core.num_open == cluster.core.num_waiting == 0
