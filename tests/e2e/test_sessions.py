"""Sessions on real models: exact, cached, shared by replicas, and there after SIGKILL of everything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from openai import OpenAI

from remora.cache_actors.registry import REGISTRY_NAME, ray_namespace

pytestmark = pytest.mark.e2e

CLUSTER = "e2e"
LONG = "Tell me about rivers that flow from the mountains to the sea, and about the towns beside them. " * 6


def call(platform: Any, path: str, body: dict[str, Any] | None = None) -> Any:
    response = platform.http.post(path, json=body or {}, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def session(platform: Any) -> Iterator[str]:
    made = call(platform, "/v1/sessions", {"model": "smollm2"})["id"]
    yield made
    platform.http.delete(f"/v1/sessions/{made}")


def turn(platform: Any, session_id: str, content: str, **more: Any) -> Any:
    response = platform.chat(content, session_id=session_id, **{"max_tokens": 24, **more})
    assert response.status_code == 200, response.text
    return response.json()


def log_of(platform: Any, session_id: str) -> list[int]:
    return list(platform.get(f"/v1/sessions/{session_id}?include_tokens=true")["token_ids"])


def text_of(document: Any) -> str:
    return str(document["choices"][0]["message"]["content"])


def cold_text(platform: Any, prompt: list[int], namespace: str) -> Any:
    """The greedy answer to the very tokens, in a namespace that shares nothing with the session's."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 24, "temperature": 0, "namespace": namespace}
    return call(platform, "/v1/completions", body)


def registry_pid() -> int:
    registry = ray.get_actor(REGISTRY_NAME, namespace=ray_namespace(CLUSTER))
    return int(ray.get(registry.pid.remote(), timeout=30))


def test_turns_are_exact_and_only_their_tail_is_computed(platform: Any, session: str) -> None:
    first = turn(platform, session, LONG)
    before = log_of(platform, session)
    second = turn(platform, session, "And what do they carry with them?")
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(before) // 32 * 32 - 32
    after = log_of(platform, session)
    assert after[: len(before)] == before
    assert len(before) > 100
    prompt = after[: usage["prompt_tokens"]]
    told = call(platform, "/detokenize", {"model": "smollm2", "tokens": before})["prompt"]
    assert text_of(first) in told
    cold = cold_text(platform, prompt, "smollm2/small")
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"][0]["text"] == text_of(second)


def test_the_openai_client_needs_only_the_new_message(client: OpenAI, platform: Any, session: str) -> None:
    whole = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "My name is Ada. Say hello."}],
        temperature=0,
        max_tokens=40,
        extra_body={"session_id": session},
    )
    history = [
        {"role": "user", "content": "My name is Ada. Say hello."},
        {"role": "assistant", "content": whole.choices[0].message.content},
        {"role": "user", "content": "What is my name?"},
    ]
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="smollm2", messages=[history[2]], temperature=0, max_tokens=16, stream=True,  # type: ignore[list-item]
        extra_body={"session_id": session},
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    rendered = call(platform, "/tokenize", {"model": "smollm2", "messages": history})["tokens"]
    log = log_of(platform, session)
    # The model ended its answer by itself: the log is then what the template writes for the whole conversation.
    assert log[: len(rendered)] == rendered
    resent = client.chat.completions.create(model="smollm2", messages=history, temperature=0, max_tokens=16)  # type: ignore[arg-type]
    assert resent.choices[0].message.content == text


def test_forks_share_the_cache_and_go_their_own_ways(platform: Any, session: str) -> None:
    turn(platform, session, LONG)
    fork = call(platform, f"/v1/sessions/{session}/fork", {})["id"]
    length = len(log_of(platform, session))
    one, other = turn(platform, session, "Name one river."), turn(platform, fork, "Name one town.")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] >= length // 32 * 32 - 32
    for session_id, answer in ((session, one), (fork, other)):
        prompt = log_of(platform, session_id)[: answer["usage"]["prompt_tokens"]]
        assert cold_text(platform, prompt, "smollm2/small")["choices"][0]["text"] == text_of(answer)
    platform.http.delete(f"/v1/sessions/{fork}")


def test_20_sg36475_a_client_that_leaves_mid_turn_leaves_the_history_whole(platform: Any, session: str) -> None:
    turn(platform, session, "Say one word.")
    before = log_of(platform, session)
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Tell me a long story."}], "stream": True,
            "session_id": session, "max_tokens": 1000, "ignore_eos": True}  # fmt: skip
    with platform.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                break
    platform.eventually(lambda: platform.referenced_blocks() == 0, 10, what="the turn's blocks are back")
    assert log_of(platform, session) == before
    answer = turn(platform, session, "And another word.", on_conflict="wait")
    prompt = log_of(platform, session)[: answer["usage"]["prompt_tokens"]]
    assert prompt[: len(before)] == before
    assert cold_text(platform, prompt, "smollm2/small")["choices"][0]["text"] == text_of(answer)


def test_sessions_outlive_a_killed_registry_and_a_turn_goes_on_over_it(platform: Any, session: str) -> None:
    turn(platform, session, "Say one word.")
    before = log_of(platform, session)
    pid = registry_pid()
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True,
            "session_id": session, "max_tokens": 100, "ignore_eos": True, "temperature": 0}  # fmt: skip
    with platform.http.stream("POST", "/v1/chat/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()
        for line in lines:
            if '"content":"' in line and '"content":""' not in line:
                break
        os.kill(pid, signal.SIGKILL)
        rest = list(lines)
    assert [line for line in rest if line][-1] == "data: [DONE]", rest[-3:]
    assert not any('"error"' in line for line in rest), rest[-3:]
    after = log_of(platform, session)
    assert after[: len(before)] == before
    assert len(after) >= len(before) + 100
    assert registry_pid() != pid
    turn(platform, session, "And then?")


def test_a_killed_replica_costs_a_session_nothing_but_time(platform: Any, session: str) -> None:
    turn(platform, session, LONG)
    before = log_of(platform, session)
    for replica in platform.replicas("smollm2"):
        os.kill(replica["card"]["pid"], signal.SIGKILL)
    time.sleep(0.5)
    answer = turn(platform, session, "And what do they carry?")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(before) // 32 * 32 - 32
    prompt = log_of(platform, session)[: answer["usage"]["prompt_tokens"]]
    assert cold_text(platform, prompt, "smollm2/small")["choices"][0]["text"] == text_of(answer)


def test_another_model_may_not_write_the_session(platform: Any, session: str) -> None:
    response = platform.chat("hi", model="smollm2-int8", session_id=session)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
