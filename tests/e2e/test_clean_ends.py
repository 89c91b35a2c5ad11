"""Clients that leave, wherever their request is, leave nothing behind."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

QUEUE = "smollm2/queue"
HEADERS = {"X-Remora-Namespace": QUEUE}


def _namespace(platform: Any, name: str) -> dict[str, Any]:
    (found,) = [each for each in platform.get("/v1/namespaces")["data"] if each["id"] == name]
    (usage,) = found["pools"].values()
    return dict(usage)


def test_a_client_that_leaves_while_streaming_frees_its_blocks_within_a_second(platform: Any) -> None:
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with platform.http.stream("POST", "/v1/completions", json=body) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 5:
                break
        assert platform.referenced_blocks() > 0
    platform.eventually(lambda: platform.referenced_blocks() == 0, 1.0, what="blocks are back")


def test_a_client_that_leaves_while_queued_frees_its_place(platform: Any) -> None:
    """The namespace has 34 blocks; each of the two requests starts with 23, and the first runs for seconds."""
    body = {"model": "smollm2", "prompt": [5] * 700, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with platform.http.stream("POST", "/v1/completions", json=body, headers=HEADERS) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept, because dropping the iterator would close the connection
        next(lines)
        with _connected_request(platform, {**body, "prompt": [6] * 700}):
            platform.eventually(lambda: _namespace(platform, QUEUE)["num_waiting"] == 1, 5, what="one waits")
        platform.eventually(lambda: _namespace(platform, QUEUE)["num_waiting"] == 0, 1.0, what="none waits")
        assert _namespace(platform, QUEUE)["num_running"] == 1
    platform.eventually(lambda: platform.referenced_blocks() == 0, 1.0, what="blocks are back")


@contextmanager
def _connected_request(platform: Any, body: dict[str, Any]) -> Iterator[None]:
    """A client that has asked and hangs up when the block ends."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"X-Remora-Namespace: {QUEUE}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", platform.config.http.port)) as connection:
        connection.sendall(head.encode() + data)
        yield


def test_two_hundred_mixed_requests_half_of_them_aborted_return_to_the_baseline(platform: Any) -> None:
    draw = random.Random(5)
    bodies = [
        {
            "model": draw.choice(["smollm2", "smollm2-int8"]),
            "prompt": f"Story number {draw.randrange(20)}: " + "once upon a time " * draw.randrange(1, 6),
            "max_tokens": draw.randrange(1, 40),
            "n": draw.choice([1, 1, 2]),
            "temperature": draw.choice([0, 1]),
            "stream": draw.random() < 0.7,
            "ignore_eos": True,
        }
        for _ in range(200)
    ]

    def run(index: int) -> str:
        body = bodies[index]
        if index % 2:
            try:
                timeout = httpx.Timeout(30, read=0.05 + index % 7 / 10)
                platform.http.post("/v1/completions", json=body, timeout=timeout)
            except httpx.ReadTimeout:
                return "aborted"
            return "ended before"
        response = platform.http.post("/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        if body["stream"]:
            assert response.text.endswith("data: [DONE]\n\n")
            documents = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            assert not any("error" in document for document in documents)
            reasons = [each["finish_reason"] for document in documents for each in document["choices"]]
            assert reasons.count("length") == body["n"]
        else:
            assert response.json()["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
        return "done"

    with ThreadPoolExecutor(32) as threads:
        outcomes = list(threads.map(run, range(200)))
    assert outcomes.count("done") == 100
    assert outcomes.count("aborted") > 20
    platform.eventually(lambda: platform.referenced_blocks() == 0, 2.0, what="blocks are back")
    time.sleep(0.5)
    metrics = platform.http.get("/metrics").text
    assert "remora_router_open_requests 0.0" in metrics
    for line in metrics.splitlines():
        if line.startswith(("remora_engine_running_sequences{", "remora_engine_waiting_sequences{")):
            assert line.endswith(" 0.0"), line
