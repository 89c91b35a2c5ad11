"""What cannot be served is answered at once by name, through HAProxy and Serve too, and the next request works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return dict(response.json()["error"])


@pytest.fixture(autouse=True)
def next_request_works(platform: Any) -> Iterator[None]:
    yield
    assert platform.chat("hi", max_tokens=2).status_code == 200


def test_an_unknown_model_or_namespace_is_not_found(platform: Any) -> None:
    assert error_of(platform.http.post("/v1/chat/completions", json={**CHAT, "model": "x"}), 404)["param"] == "model"
    response = platform.http.post("/v1/chat/completions", json=CHAT, headers={"X-Remora-Namespace": "smollm2-int8"})
    assert error_of(response, 404)["param"] == "namespace"


def test_a_prompt_longer_than_the_context_names_both_numbers(platform: Any) -> None:
    response = platform.http.post("/v1/completions", json={"model": "smollm2", "prompt": [5] * 2050, "max_tokens": 4})
    error = error_of(response, 400)
    assert "2054" in error["message"]
    assert "2048" in error["message"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": "smollm2", "prompt": ""}, "prompt"),
        ("/v1/completions", {"model": "smollm2", "prompt": []}, "prompt"),
        ("/v1/completions", {"model": "smollm2", "prompt": [49152]}, "prompt"),
        ("/v1/completions", {"model": "smollm2", "prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias"),
        ("/v1/completions", {"model": "smollm2", "prompt": "a", "stop_token_ids": [49152]}, "stop_token_ids"),
        ("/v1/chat/completions", {**CHAT, "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "nonsense"}}}}, "response_format"),
    ],
)  # fmt: skip
def test_case_25_bad_input_is_refused_by_name(platform: Any, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(platform.http.post(path, json=body), 400)["param"] == param


def test_malformed_json_and_large_bodies_are_refused(platform: Any) -> None:
    headers = {"content-type": "application/json"}
    error_of(platform.http.post("/v1/chat/completions", content=b'{"model": ', headers=headers), 400)
    body = json.dumps({"model": "smollm2", "prompt": "x" * 300_000}).encode()
    error_of(platform.http.post("/v1/completions", content=body, headers=headers), 413)


def test_over_quota_is_429_with_retry_after(platform: Any) -> None:
    """The namespace may hold 8 MiB, less than this request can come to need."""
    for stream in (False, True):
        response = platform.http.post(
            "/v1/completions",
            json={"model": "smollm2", "prompt": [5] * 100, "max_tokens": 1000, "stream": stream},
            headers={"X-Remora-Namespace": "smollm2/small"},
        )
        assert error_of(response, 429)["code"] == "over_quota"
        assert int(response.headers["retry-after"]) >= 1
