"""Models without replicas because nobody asked: who asks wakes them, waits, and loses nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.serving.test_leaving import opened
from tests.unit.serving.test_router import job, read, text

from remora.deployments import waker
from remora.deployments.idle_watch import IdleWatch
from remora.platform.base import telemetry
from remora.platform.base import telemetry_names as names
from remora.platform.base.clock import ManualClock
from remora.platform.base.config import RemoraConfig, TelemetryConfig, parse_config
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import ModelId
from remora.platform.base.span_file import traces_dir
from remora.platform.base.trace_store import TraceStore

TINY = ModelId("tiny")


@pytest.fixture
def config() -> RemoraConfig:
    return parse_config(
        {
            "http": {"queue_timeout_s": 0.3, "max_body_bytes": 20_000},
            "models": [
                {"name": "tiny", "source": "unused", "idle_timeout_s": 60, "wake_timeout_s": 1.5},
                {"name": "other", "source": "unused"},
            ],
            "namespaces": [{"name": "chat", "model": "tiny", "guaranteed": "1MiB"}],
        }
    )


def test_a_replica_wants_to_sleep_when_it_has_been_idle_for_its_time() -> None:
    clock = ManualClock()
    watch, never = IdleWatch(60, now_s=clock.now_s), IdleWatch(None, now_s=clock.now_s)
    clock.advance(59)
    assert not watch.is_over()
    watch.note_busy()
    clock.advance(59)
    assert not watch.is_over()
    clock.advance(1)
    assert watch.is_over()
    assert not never.is_over()


async def test_many_requests_wake_a_model_once_and_wait_longer_than_in_a_queue(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    old, new = make_replica("old"), make_replica("new")
    await cluster.add(old)
    cluster.remove(old)
    streams = [await cluster.core.open(dataclasses.replace(job(), request_id=f"q{i}")) for i in range(20)]
    await asyncio.sleep(0.5)  # beyond the queue time-out
    assert cluster.woken == [TINY]
    await cluster.add(new)
    await cluster.settle(lambda: len(new.running) == 20)
    assert {request.queue_timeout_s for request in new.submitted} == {0.3}, "the queue begins behind the wake"
    await new.step(5)
    assert [await read(stream) for stream in streams] == [[text(expected_token, stream)] for stream in streams]
    assert cluster.core.stats.registry.get_sample_value("remora_model_wakes_total", {"model": "tiny"}) == 1
    assert cluster.woken == [TINY]


async def test_a_router_that_has_never_seen_the_model_wakes_it_too(cluster: Any, make_replica: Any) -> None:
    opening = asyncio.create_task(cluster.core.open(job()))
    await cluster.settle(lambda: cluster.woken == [TINY])
    replica = make_replica("a")
    await cluster.add(replica)
    stream = await opening
    await cluster.settle(lambda: replica.running)
    await replica.step(5)
    await read(stream)


async def test_a_model_that_does_not_wake_is_asked_for_again_and_then_given_up(
    cluster: Any, make_replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waker, "_REPEAT_S", 0.1)
    replica = make_replica("a")
    await cluster.add(replica)
    cluster.remove(replica)
    stream = await cluster.core.open(job())
    with pytest.raises(Unavailable, match=r"within 1\.5 s"):
        await read(stream)
    assert 5 < len(cluster.woken) < 20
    await asyncio.sleep(0.2)
    num_calls = len(cluster.woken)
    await asyncio.sleep(0.3)
    assert len(cluster.woken) == num_calls, "nobody waits any more"


async def test_a_request_that_crosses_the_end_of_the_last_replica_wakes_the_model_and_goes_on(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    old, new = make_replica("old"), make_replica("new")
    await cluster.add(old)
    stream = await opened(cluster, old, max_tokens=6)
    await old.step(2)
    await cluster.settle(lambda: stream.log.num_tokens == 2)
    old.leaving = True
    late = await cluster.core.open(dataclasses.replace(job(max_tokens=6), request_id="late"))
    await cluster.settle(lambda: cluster.woken == [TINY])
    await cluster.add(new)
    await cluster.settle(lambda: "late~1" in new.running)
    for _ in range(10):
        await old.step()
        await new.step()
    assert await read(stream) == [text(expected_token, stream)]
    assert await read(late) == [text(expected_token, late)]
    assert (stream.num_lost, late.num_lost) == (0, 0)


async def test_the_wake_is_a_span_of_the_request(cluster: Any, make_replica: Any, tmp_path: Path) -> None:
    telemetry.shutdown_telemetry()
    telemetry.setup_telemetry("unit", TelemetryConfig(), tmp_path)
    old, new = make_replica("old"), make_replica("new")
    await cluster.add(old)
    cluster.remove(old)
    with telemetry.span("chat tiny", parent={}) as request:
        context = telemetry.inject(request)
        stream = await cluster.core.open(dataclasses.replace(job(), trace_context=context))
        await cluster.add(new)
        await cluster.settle(lambda: new.running)
        await new.step(5)
        await read(stream)
    telemetry.shutdown_telemetry()
    trace_id = context["traceparent"].split("-")[1]
    spans = {each.name: each for each in TraceStore(traces_dir(tmp_path)).spans(trace_id)}
    assert spans[names.MODEL_WAKE].parent_span_id == spans["chat tiny"].span_id
    assert spans[names.MODEL_WAKE].start_ns < spans[names.ROUTER_ROUTE].start_ns < spans[names.MODEL_WAKE].end_ns


async def test_a_sleeping_model_is_shown_as_such_and_does_not_make_the_platform_unready(
    cluster: Any, server: Any, http: httpx.AsyncClient, make_replica: Any
) -> None:
    await cluster.add(make_replica("o", "other"))
    cluster.remove(server.replica)

    async def state() -> str:
        data = (await http.get("/v1/models")).json()["data"]
        return str(next(each["state"] for each in data if each["id"] == "tiny"))

    assert await state() == "asleep"
    assert (await http.get("/ready")).status_code == 200
    assert 'remora_model_asleep{model="tiny"} 1.0' in (await http.get("/metrics")).text
    waking = asyncio.create_task(http.post("/v1/models/tiny/wake", json={}))
    await cluster.settle(lambda: cluster.woken == [TINY])
    assert await state() == "starting"
    await cluster.add(make_replica("b"))
    assert (await waking).json()["state"] == "ready"
    assert await state() == "ready"
    assert (await http.post("/v1/models/tiny/sleep", json={})).json() == {
        "id": "tiny", "object": "model", "state": "asleep"
    }  # fmt: skip
    assert cluster.put_to_sleep == [TINY]
    refused = await http.post("/v1/models/other/sleep", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert "idle_timeout_s" in refused.json()["error"]["message"]


async def test_a_model_that_never_sleeps_is_missing_without_a_replica(http: httpx.AsyncClient) -> None:
    answer = await http.get("/ready")
    assert (answer.status_code, answer.json()["missing"]) == (503, ["other"])
