"""SIGKILL of a replica, of all of them, of the pool: streams go on, and what was cached is still cached."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import httpx
import pytest

from remora.platform.cli.processes import command_of, marked_processes

pytestmark = pytest.mark.e2e

LONG = "Rivers flow from the mountains to the sea and carry stones, sand and stories with them. " * 12


class Reading(threading.Thread):
    """Reads one streamed completion in the background."""

    def __init__(self, platform: Any, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._platform = platform
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self.text = ""
        self.documents: list[Any] = []
        self.done = False
        self.trace_id = ""
        self.start()

    def run(self) -> None:
        with self._platform.http.stream("POST", "/v1/completions", json=self._body, timeout=120) as response:
            self.trace_id = response.headers["x-remora-trace-id"]
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line:
                    document = json.loads(line[6:])
                    self.documents.append(document)
                    for choice in document.get("choices", ()):
                        self.text += choice["text"]


def _busy_replica(platform: Any, model: str) -> dict[str, Any]:
    busy = [each for each in platform.replicas(model) if each["stats"] and each["stats"]["num_running"]]
    return busy[0] if busy else {}


@pytest.mark.parametrize("model", ["smollm2", "smollm2-int8"])
def test_a_stream_goes_on_when_its_replica_is_killed(platform: Any, model: str) -> None:
    """smollm2 has a second replica; smollm2-int8 waits for the restarted one."""
    body = {"model": model, "prompt": LONG, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    expected = platform.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    reading = Reading(platform, body)
    platform.eventually(lambda: len(reading.documents) > 5, 20, what="the stream has begun")
    os.kill(platform.eventually(lambda: _busy_replica(platform, model), 5)["card"]["pid"], signal.SIGKILL)
    assert not reading.done
    reading.join(120)
    assert reading.done
    assert reading.text == expected
    assert reading.documents[-1]["usage"]["completion_tokens"] == 400
    assert 'remora_router_resumed_requests_total{model="' + model in platform.http.get("/metrics").text

    def spans() -> list[Any]:
        """Of the one trace that both attempts are in, once the request's own span has come."""
        found = [span for _, span in platform.collector.trace(reading.trace_id)]
        return found if any(not span.parent_span_id for span in found) else []

    found = platform.eventually(spans, 10, what="the trace at the OTLP collector")
    assert [span.name for span in found].count("router.route") == 2
    values = [{each.key: each.value for each in span.attributes} for span in found if span.name == "pool.admit"]
    assert values[-1]["remora.admit.cached_tokens"].int_value > 0
    assert values[-1]["remora.request.id"].string_value.endswith("~1")
    assert values[-1]["remora.admit.recomputed_tokens"].int_value < 64, "sealed blocks are found again"


def test_prefixes_outlive_every_replica_of_the_model(platform: Any) -> None:
    body = {"model": "smollm2", "prompt": LONG + "The end.", "max_tokens": 4, "temperature": 0}
    first = platform.http.post("/v1/completions", json=body).json()
    for replica in platform.replicas("smollm2"):
        os.kill(replica["card"]["pid"], signal.SIGKILL)
    again = platform.http.post("/v1/completions", json=body, timeout=120).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 64


def test_two_replicas_share_prefixes_through_the_pool(platform: Any) -> None:
    platform.eventually(lambda: len(platform.replicas("smollm2")) == 2, 90, what="two replicas")
    body = {"model": "smollm2", "prompt": "A shared beginning. " + LONG, "max_tokens": 4, "temperature": 0}
    before = {each["id"]: each["stats"]["num_requests"] for each in platform.replicas("smollm2")}
    first = platform.http.post("/v1/completions", json=body).json()
    occupied = Reading(platform, {"model": "smollm2", "prompt": "Once", "max_tokens": 150, "ignore_eos": True})
    platform.eventually(lambda: occupied.documents, 20, what="one replica is busy")
    second = platform.http.post("/v1/completions", json=body).json()
    after = {each["id"]: each["stats"]["num_requests"] for each in platform.replicas("smollm2")}
    occupied.join(60)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 64
    # The first prompt and the occupying one went to one replica, the repeated prompt to the other.
    assert sorted(after[each] - before[each] for each in before) == [1, 2]


def test_a_killed_router_comes_back_and_leaves_no_request_running(platform: Any) -> None:
    """Its clients lose their connection, which it owned; everything else goes on."""
    session = os.environ["REMORA_TEST_SESSION"]
    marked = marked_processes("REMORA_TEST_SESSION", session)
    (router,) = [each.pid for each in marked if command_of(each.pid).startswith("ray::ServeReplica:remora:Router")]
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}

    def read_and_kill() -> None:
        with platform.http.stream("POST", "/v1/completions", json=body) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number == 5:
                    os.kill(router, signal.SIGKILL)

    with pytest.raises(httpx.HTTPError):
        read_and_kill()

    def is_back() -> bool:
        try:
            response = platform.http.get("/ready")
        except httpx.TransportError:
            return False  # a connection that HAProxy had kept to the dead router
        return response.status_code == 200

    platform.eventually(is_back, 60, what="the router is back")
    # Replicas give up on a router that says nothing for five seconds.
    platform.eventually(lambda: platform.referenced_blocks() == 0, 8, what="blocks are back")


def test_requests_and_caches_outlive_the_pool_actor(platform: Any) -> None:
    body = {"model": "smollm2", "prompt": "Before the pool fell. " + LONG, "max_tokens": 300, "temperature": 0}
    expected = platform.http.post("/v1/completions", json=body).json()
    pool = platform.pool()
    reading = Reading(platform, body)
    platform.eventually(lambda: len(reading.documents) > 3, 20, what="the stream has begun")
    os.kill(pool["pid"], signal.SIGKILL)
    reading.join(120)
    assert reading.text == expected["choices"][0]["text"]
    again = platform.http.post("/v1/completions", json={**body, "max_tokens": 4}, timeout=120).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= expected["usage"]["prompt_tokens"] - 64
    restarted = platform.eventually(lambda: list(platform.get("/v1/pools")["data"]), 20)[0]
    assert restarted["pid"] != pool["pid"]
    assert restarted["num_restarts"] == pool["num_restarts"] + 1
