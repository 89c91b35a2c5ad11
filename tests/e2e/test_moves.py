"""Requests that are moved while they stream, between real replicas: exact, without a gap, with their cache."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from tests.e2e.test_losses import LONG

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "text": {"type": "string", "maxLength": 400}},
    "required": ["name", "text"],
    "additionalProperties": False,
}
TURNS = {
    "greedy": {"temperature": 0, "max_tokens": 160, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 11, "max_tokens": 160, "ignore_eos": True},
    "a pending stop string": {"temperature": 0, "max_tokens": 160, "ignore_eos": True, "stop": ["the zebra of Oz"]},
    "a grammar": {
        "temperature": 0,
        "max_tokens": 160,
        "response_format": {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}},
    },
}


def _stream(platform: Any, body: dict[str, Any], move_at: int | None) -> tuple[str, list[dict[str, Any]]]:
    """The text of a session's first turn; with `move_at` it is moved to and fro, every so many chunks."""
    session = platform.http.post("/v1/sessions", json={"model": "smollm2"}).json()["id"]
    body = {"model": "smollm2", "prompt": LONG, "session_id": session, "stream": True, **body}
    text, moves, num_chunks = "", [], 0
    try:
        with platform.http.stream("POST", "/v1/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                document = json.loads(line[6:])
                assert "error" not in document, document
                text += "".join(choice["text"] for choice in document["choices"])
                num_chunks += 1
                if move_at is not None and num_chunks % move_at == 0 and len(moves) < 3:
                    moves += _move(platform, session)
    finally:
        platform.http.delete(f"/v1/sessions/{session}")
    return text, moves


def _move(platform: Any, session: str) -> list[dict[str, Any]]:
    """What the move did; nothing if the request ended before, which it may on a busy machine."""
    # A source that has been left lets its blocks go a moment later.
    target = platform.eventually(partial(_idle_replica, platform), 10, what="one replica has nothing to do")
    response = platform.http.post(f"/v1/sessions/{session}/migrate", json={"to": {"replica": target}}, timeout=60)
    if response.status_code == 409 and "ended" in response.text:
        return []
    assert response.status_code == 200, response.text
    return [each for each in (dict(response.json()),) if each["running"]]


def _idle_replica(platform: Any) -> str | None:
    idle = [each["id"] for each in platform.replicas("smollm2") if not each["stats"]["num_running"]]
    return idle[0] if idle else None


@pytest.mark.parametrize("kind", TURNS)
def test_a_moved_stream_is_that_of_an_unmoved_run(platform: Any, kind: str) -> None:
    platform.eventually(lambda: len(platform.replicas("smollm2")) == 2, 90, what="two replicas")
    unmoved, _ = _stream(platform, TURNS[kind], None)
    moved, moves = _stream(platform, TURNS[kind], 12)
    assert moves
    assert moved == unmoved
    for each in moves:
        assert each["running"]
        assert each["tokens"]["shared"] > 200, "the replicas share a pool"
        assert each["from"] != each["to"]


def test_a_drained_replica_is_empty_and_its_stream_goes_on(platform: Any) -> None:
    platform.eventually(lambda: len(platform.replicas("smollm2")) == 2, 90, what="two replicas")
    body = {"model": "smollm2", "prompt": LONG, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = platform.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    text, drained = "", None
    try:
        with platform.http.stream("POST", "/v1/completions", json={**body, "stream": True}, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                if drained is None and len(text) > 40:
                    (drained,) = [each for each in platform.replicas("smollm2") if each["stats"]["num_running"]]
                    assert platform.http.post(f"/v1/replicas/{drained['id']}/drain", json={}).status_code == 200
                    platform.eventually(partial(_is_empty, platform, drained["id"]), 10, what="it is empty")
        assert text == expected
        (seen,) = [each for each in platform.replicas("smollm2") if each["id"] == drained["id"]]
        assert seen["draining"]
        assert platform.http.post("/v1/completions", json={**body, "max_tokens": 4}).status_code == 200
        assert _num_requests(platform, drained["id"]) == drained["stats"]["num_requests"]
    finally:
        assert platform.http.post(f"/v1/replicas/{drained['id']}/resume", json={}).status_code == 200


def _stats(platform: Any, replica_id: str) -> dict[str, Any]:
    (found,) = [each["stats"] for each in platform.replicas("smollm2") if each["id"] == replica_id]
    return dict(found)


def _is_empty(platform: Any, replica_id: str) -> bool:
    return not _stats(platform, replica_id)["num_running"]


def _num_requests(platform: Any, replica_id: str) -> int:
    return int(_stats(platform, replica_id)["num_requests"])


def test_a_session_goes_on_with_another_model_and_back(platform: Any) -> None:
    session = platform.http.post("/v1/sessions", json={"model": "smollm2"}).json()["id"]
    try:
        platform.chat(LONG, session_id=session, max_tokens=8)
        log = platform.get(f"/v1/sessions/{session}?include_tokens=true")["token_ids"]
        moved = platform.http.post(f"/v1/sessions/{session}/migrate", json={"to": {"model": "smollm2-int8"}}).json()
        num_taken = (len(log) - 1) // 32 * 32
        assert moved["ranges"] == [
            {"from": 0, "to": num_taken, "how": "copied", "kv_of": "smollm2"},
            {"from": num_taken, "to": len(log), "how": "recomputed"},
        ]
        edits = platform.get(f"/v1/sessions/{session}")["edits"]
        assert [(each["position"], each["kind"]) for each in edits] == [(0, "adopted"), (num_taken, "recomputed")]
        body = {"model": "smollm2-int8", "prompt": log, "max_tokens": 1}
        stranger = platform.http.post("/v1/completions", json=body).json()
        assert stranger["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "it is no plain KV of that model"
        answer = platform.chat("And then?", model="smollm2-int8", session_id=session, max_tokens=8).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(log) // 32 * 32, "computed ahead"
        back = platform.http.post(f"/v1/sessions/{session}/migrate", json={"to": {"model": "smollm2"}}).json()
        assert back["tokens"]["shared"] >= (len(log) - 1) // 32 * 32, "what it had computed is there still"
        after = platform.get(f"/v1/sessions/{session}")
        assert (after["num_turns"], after["edits"]) == (2, []), "behind its own KV again"
        small = {"to": {"model": "smollm2", "namespace": "smollm2/small"}}
        again = platform.http.post(f"/v1/sessions/{session}/migrate", json=small).json()
        assert again["tokens"]["recomputed"] == after["num_tokens"], "nothing is shared between namespaces"
    finally:
        platform.http.delete(f"/v1/sessions/{session}")
