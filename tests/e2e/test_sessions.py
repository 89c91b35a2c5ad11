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

from remora.cache_actors.cluster_names import REGISTRY_NAME, ray_namespace

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


def test_case_20_a_client_that_leaves_mid_turn_leaves_the_history_whole(platform: Any, session: str) -> None:
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


def test_case_05_the_same_turn_after_the_same_cut_is_the_same_five_times(platform: Any, session: str) -> None:
    turn(platform, session, LONG)
    logs = []
    for _ in range(5):
        call(platform, f"/v1/sessions/{session}/truncate", {"num_turns": 1})
        turn(platform, session, "And then? Answer at length.")
        logs.append(log_of(platform, session))
    assert logs == [logs[0]] * 5


def test_case_13_sessions_that_return_after_eviction_have_their_own_facts(platform: Any) -> None:
    """The namespace has room for two of them."""
    ids = [f"secret-{i}" for i in range(10)]
    for i, name in enumerate(ids):
        call(platform, "/v1/sessions", {"model": "smollm2", "id": name, "namespace": "smollm2/small"})
        turn(platform, name, f"The code of room {i} is {7919 * (i + 3)}. {LONG[:500]}", max_tokens=4)
    cached = []
    for i, name in enumerate(ids):
        before = log_of(platform, name)
        answer = turn(platform, name, "What is the code?", max_tokens=8)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] / len(before))
        log = log_of(platform, name)
        assert log[: len(before)] == before
        told = call(platform, "/detokenize", {"model": "smollm2", "tokens": before})["prompt"]
        assert f"The code of room {i} is {7919 * (i + 3)}." in told
        body = {"model": "smollm2", "prompt": log[: answer["usage"]["prompt_tokens"]], "max_tokens": 8,
                "temperature": 0}  # fmt: skip
        assert call(platform, "/v1/completions", body)["choices"][0]["text"] == text_of(answer)
        platform.http.delete(f"/v1/sessions/{name}")
    assert min(cached) < 0.6, "nothing was evicted"


def test_a_session_rolls_within_its_cache_limit_and_keeps_its_kv(platform: Any) -> None:
    """Five blocks of 32 tokens; no stranger finds what was moved in them."""
    limit = {"context_overflow": "roll", "keep_tokens": 16, "cache_limit": 5 * 737_280}
    session = call(platform, "/v1/sessions", {"model": "smollm2", **limit})["id"]
    for number in range(3):
        turn(platform, session, f"{number}: {LONG[:300]}", max_tokens=16, ignore_eos=True)
    before = platform.get(f"/v1/sessions/{session}")
    assert before["num_tokens"] <= 161
    assert before["num_turns"] == 3
    assert [edit["kind"] for edit in before["edits"]] == ["removed"]
    (found,) = before["blocks"]["device"].values()
    assert found == before["blocks"]["full"] >= 2
    log = log_of(platform, session)
    cold = call(platform, "/v1/completions", {"model": "smollm2", "prompt": log, "max_tokens": 1})
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a stranger found edited KV"
    answer = turn(platform, session, "Go on.", max_tokens=8)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= found * 32 - 32
    platform.eventually(lambda: platform.referenced_blocks() == 0, 10, what="all blocks are back")
    platform.http.delete(f"/v1/sessions/{session}")


def test_a_range_is_taken_out_of_the_middle_and_the_rest_is_kept(platform: Any, session: str) -> None:
    turn(platform, session, LONG)
    before = log_of(platform, session)
    cut = call(platform, f"/v1/sessions/{session}/truncate", {"remove": {"start": 40, "end": 70}})
    assert cut["num_tokens"] == len(before) - 30
    left = before[:40] + before[70:]
    assert log_of(platform, session) == left
    answer = turn(platform, session, "What is it about?")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(before) // 32 * 32 - 32
    assert log_of(platform, session)[: len(left)] == left
    assert [edit["kind"] for edit in platform.get(f"/v1/sessions/{session}")["edits"]] == ["removed"]


def test_the_pool_hears_of_a_session_that_is_deleted(platform: Any) -> None:
    """Nothing else happens meanwhile, so what it journals is that."""
    made = call(platform, "/v1/sessions", {"model": "smollm2"})["id"]
    platform.settle()
    before = platform.pool()["journal_bytes"]
    assert platform.http.delete(f"/v1/sessions/{made}").status_code == 200
    platform.eventually(lambda: platform.pool()["journal_bytes"] > before, 10, what="a command in the journal")


def test_another_model_may_not_write_the_session(platform: Any, session: str) -> None:
    response = platform.chat("hi", model="smollm2-int8", session_id=session)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
