"""Every fault is answered at once, in OpenAI's shape, naming the field; the next request works."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from openai import BadRequestError, NotFoundError, RateLimitError

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
COMPLETION = {"model": "tiny", "prompt": "abc", "max_tokens": 3}


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    document = response.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return dict(document["error"])


@pytest.fixture(autouse=True)
async def next_request_works(http: Any, server: Any) -> Any:
    yield
    server.replica.error = None
    server.paused = False
    response = await http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 200, response.text
    assert server.core.num_open == 0


BAD_FIELDS = [
    ("temperature", -1), ("temperature", 3), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.5), ("top_k", -2),
    ("top_k", 1.5), ("min_p", 2), ("n", 0), ("n", 1000), ("n", True), ("seed", 2**63), ("seed", 1.5),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", "many"), ("min_tokens", -1), ("min_tokens", 4),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("stop", 7), ("stop", [""]),
    ("stop", ["x"] * 17), ("stop_token_ids", [300]), ("stop_token_ids", ["a"]), ("stop_token_ids", [-1]),
    ("logit_bias", {"300": 1}), ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}), ("logit_bias", [1]),
    ("stream", "yes"), ("stream_options", {"include_usage": True}), ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}), ("best_of", 2), ("suffix", "x"), ("store", True), ("nonsense", 1),
    ("model", ""), ("model", None), ("priority", 5000), ("namespace", 3),
]  # fmt: skip


async def test_case_25_a_bad_value_is_refused_by_its_name(http: Any) -> None:
    for field, value in BAD_FIELDS:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            error = error_of(await http.post(path, json={**body, field: value}), 400)
            assert str(error["param"]).split(".")[0] == field, (path, field, value, error)
            assert field in error["message"]
            assert error["type"] == "invalid_request_error"


BAD_CHAT_FIELDS = [
        ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required"),
        ("functions", [{"name": "f"}]), ("audio", {}), ("modalities", ["audio"]), ("top_logprobs", 3),
        ("messages", []), ("messages", None), ("messages", "hi"), ("messages", [3]),
        ("max_completion_tokens", 0), ("logprobs", 3), ("chat_template", "x"),
    ]  # fmt: skip


async def test_a_bad_value_in_a_chat_is_refused_by_its_name(http: Any) -> None:
    for field, value in BAD_CHAT_FIELDS:
        error = error_of(await http.post("/v1/chat/completions", json={**CHAT, field: value}), 400)
        assert str(error["param"]).split(".")[0] == field, (field, value, error)


BAD_MESSAGES = [
    ({"role": "user", "content": None}, "messages.0.content"),
    ({"role": "user"}, "messages.0"),
    ({"content": "x"}, "messages.0"),
    ({"role": "user", "content": 3}, "messages.0.content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content"),
    ({"role": "assistant", "content": None, "tool_calls": []}, "messages.0"),
]


async def test_case_25_a_bad_message_is_refused_by_its_place(http: Any) -> None:
    """Null content, empty tool_calls."""
    for message, where in BAD_MESSAGES:
        error = error_of(await http.post("/v1/chat/completions", json={**CHAT, "messages": [message]}), 400)
        assert str(error["param"]).startswith(where), (message, error)


BAD_PROMPTS = ["", [], [""], [[]], [300], [-1], [[97], [256, 999]], None, 5, [1, "a"], [1.5]]


async def test_case_25_a_prompt_that_cannot_be_served_is_refused_by_name(http: Any) -> None:
    """Empty prompts and ids beyond the vocabulary."""
    for prompt in BAD_PROMPTS:
        error = error_of(await http.post("/v1/completions", json={**COMPLETION, "prompt": prompt}), 400)
        assert error["param"] == "prompt", (prompt, error)


async def test_fields_that_ask_for_nothing_are_taken(http: Any) -> None:
    body = {
        **CHAT, "tools": [], "tool_choice": "none", "user": "u", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "n": None, "temperature": None, "stop": None, "top_p": None, "logprobs": False,
        "stream": False, "response_format": {"type": "text"}, "parallel_tool_calls": True, "max_completion_tokens": 3,
        "modalities": ["text"], "seed": None, "stream_options": None,
    }  # fmt: skip
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert (await http.post("/v1/completions", json={**COMPLETION, "suffix": None, "best_of": 1})).status_code == 200


async def test_echo_with_logprobs_is_refused_by_name(http: Any) -> None:
    error = error_of(await http.post("/v1/completions", json={**COMPLETION, "echo": True, "logprobs": 1}), 400)
    assert error["param"] == "echo"


async def test_a_prompt_longer_than_the_context_names_both_numbers(http: Any) -> None:
    for path, body, used in (
        ("/v1/completions", {**COMPLETION, "prompt": "x" * 300}, 303),
        ("/v1/completions", {"model": "tiny", "prompt": "x" * 200}, 201),
        ("/v1/completions", {"model": "tiny", "prompt": "x" * 100, "max_tokens": 101}, 201),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 282}]}, 303),
    ):
        error = error_of(await http.post(path, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(used) in error["message"]
        assert "200" in error["message"]
        assert error["param"] in ("prompt", "messages")


async def test_an_unknown_model_namespace_or_path_is_not_found(http: Any, openai_client: Any) -> None:
    with pytest.raises(NotFoundError) as caught:
        await openai_client.chat.completions.create(**{**CHAT, "model": "gpt-9"})
    assert caught.value.code == "model_not_found"
    assert "tiny" in caught.value.message
    error = error_of(await http.post("/v1/chat/completions", json=CHAT, headers={"X-Remora-Namespace": "no"}), 404)
    assert error["param"] == "namespace"
    assert error_of(await http.post("/v1/chat/completions", json={**CHAT, "namespace": "other"}), 404)["param"] == (
        "namespace"
    )
    assert error_of(await http.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    assert error_of(await http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(await http.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert error_of(await http.post("/tokenize", json={"model": "gpt-9", "prompt": "x"}), 404)["param"] == "model"


MALFORMED = [b"", b"{", b'{"model": tiny}', b'{"model": "tiny",}', b"\xff\xfe", b'"x"', b"[1]", b"null"]


async def test_malformed_json_is_a_bad_request(http: Any) -> None:
    for content in MALFORMED:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            response = await http.post(path, content=content, headers={"content-type": "application/json"})
            error_of(response, 400)


async def test_other_content_types_are_refused(http: Any) -> None:
    response = await http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": "text/plain"})
    assert error_of(response, 400)["param"] == "content-type"


async def test_a_body_over_the_limit_is_too_large_declared_or_not(http: Any) -> None:
    body = json.dumps({**COMPLETION, "prompt": "x" * 30_000}).encode()
    error_of(await http.post("/v1/completions", content=body, headers={"content-type": "application/json"}), 413)

    async def chunks() -> Any:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    response = await http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    assert error_of(response, 413)["code"] == "request_too_large"


async def test_over_quota_is_429_with_retry_after(http: Any, server: Any, openai_client: Any) -> None:
    server.replica.error = {"error": "OverQuota", "error_message": "chat holds all it may", "retry_after_s": 2.5}
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        error = error_of(response, 429)
        assert response.headers["retry-after"] == "3"
        assert error["code"] == "over_quota"
        assert error["type"] == "rate_limit_error"
    with pytest.raises(RateLimitError):
        await openai_client.chat.completions.create(**CHAT)
    assert server.value("remora_generations_total", model="tiny", namespace="chat", outcome="over_quota") == 3


async def test_an_engines_fault_says_no_more_than_its_class(http: Any, server: Any) -> None:
    server.replica.error = {"error": "KernelError", "error_message": "block 7 at /secret/path"}
    error = error_of(await http.post("/v1/chat/completions", json=CHAT), 500)
    assert "KernelError" in error["message"]
    assert "secret" not in error["message"]
    server.replica.error = {"error": "NoSuchClass", "error_message": "?"}
    error_of(await http.post("/v1/chat/completions", json=CHAT), 500)


async def test_an_engines_refusal_names_the_field(openai_client: Any, server: Any) -> None:
    server.replica.error = {"error": "InvalidRequest", "error_message": "response_format: unsupported keyword"}
    with pytest.raises(BadRequestError) as caught:
        await openai_client.chat.completions.create(**CHAT)
    assert caught.value.param == "response_format"


async def test_an_error_after_the_first_token_is_an_event_of_the_stream(http: Any, server: Any) -> None:
    server.paused = True

    async def read() -> tuple[int, list[str]]:
        async with http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
            return response.status_code, [line async for line in response.aiter_lines() if line]

    reading = asyncio.create_task(read())
    await server.cluster.settle(lambda: server.replica.running)
    (request, _), *_ = server.replica.running.values()
    await server.replica.step()
    failed = msgspec.structs.replace(
        server.replica._delta(request, 0, 1, 97, None),
        token_ids=(), text="", finish_reason="error", error="OverQuota", error_message="gone",
    )  # fmt: skip
    server.replica.hub.emit(request.router_id, (failed,))
    server.replica.running.clear()
    status, lines = await reading
    assert status == 200
    assert json.loads(lines[-2][6:])["error"]["code"] == "over_quota"
    assert lines[-1] == "data: [DONE]"


async def test_a_model_without_a_replica_is_unavailable_in_time(http: Any) -> None:
    async with asyncio.timeout(3):
        response = await http.post("/v1/chat/completions", json={**CHAT, "model": "other"})
    assert error_of(response, 503)["code"] == "unavailable"
    assert int(response.headers["retry-after"]) >= 1
