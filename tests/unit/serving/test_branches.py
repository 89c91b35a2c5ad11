"""Sessions forked several ways at once, on a fake replica: what is computed, what the client reads, what is kept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk
from tests.unit.serving.test_sessions import post

from remora.platform.http import branch_run

ASK = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 4}
FORK = "/v1/sessions/s/fork"


async def sessions(http: Any) -> dict[str, Any]:
    return {each["id"]: each for each in (await http.get("/v1/sessions")).json()["data"]}


async def log_of(http: Any, name: str) -> str:
    response = await http.get(f"/v1/sessions/{name}", params={"include_tokens": "true"})
    return bytes(response.json()["token_ids"]).decode()


@pytest.fixture
async def parent(http: Any) -> str:
    """The log of session "s" after one turn."""
    await post(http, "/v1/sessions", {"id": "s", "model": "tiny"})
    body = {"model": "tiny", "session_id": "s", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    await post(http, "/v1/chat/completions", body)
    return await log_of(http, "s")


async def read(http: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of a stream that ends with [DONE]."""
    lines = []
    async with http.stream("POST", FORK, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines += [line[6:]] if line else []
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_every_branch_streams_its_own_answer_behind_the_common_log(http: Any, server: Any, parent: str) -> None:
    branches = [{"seed": 1}, {"seed": 2, "max_tokens": 6, "session_id": "two"}, {"seed": 3, "temperature": 0.5}]
    body = {**ASK, "branches": branches, "stream_options": {"include_usage": True}}
    *documents, last = await read(http, body)
    asked = server.replica.submitted[1:]
    assert len({request.prompt_token_ids for request in asked}) == 1
    assert [(request.sampling.seed, request.sampling.max_tokens) for request in asked] == [(1, 4), (2, 6), (3, 4)]
    prompt = bytes(asked[0].prompt_token_ids).decode()
    assert prompt == f"{parent}\nuser: go on\nassistant: "
    texts, names, ended = ["", "", ""], ["", "", ""], {}
    for document in documents:
        (choice,) = document["choices"]
        assert document["object"] == "chat.completion.chunk"
        assert document["branch"]["index"] == choice["index"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        names[choice["index"]] = document["branch"]["session_id"]
        if choice["finish_reason"]:
            ended[choice["index"]] = document["branch"]["usage"]
    assert [len(text) for text in texts] == [4, 6, 4]
    assert len(set(texts)) == 3
    assert [ended[index]["completion_tokens"] for index in range(3)] == [4, 6, 4]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] == 4 for usage in ended.values())
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 14)
    assert names[1] == "two"
    for name, text in zip(names, texts, strict=True):
        assert await log_of(http, name) == prompt + text
    forked = [each for name, each in (await sessions(http)).items() if name != "s"]
    assert {(each["parent"], each["owner"]) for each in forked} == {("s", "a")}
    assert await log_of(http, "s") == parent


async def test_branches_come_in_one_document_and_leave_nothing_unless_kept(http: Any, server: Any, parent: str) -> None:
    body = {**ASK, "branches": [{"seed": 1}, {"seed": 2, "keep": True}, {"seed": 1}], "keep": False}
    document = await post(http, FORK, body)
    texts = [choice["message"]["content"] for choice in document["choices"]]
    assert texts[0] == texts[2] != texts[1]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["length"] * 3
    assert [each["session_id"] is None for each in document["branches"]] == [True, False, True]
    assert document["usage"]["completion_tokens"] == 12
    assert set(await sessions(http)) == {"s", document["branches"][1]["session_id"]}
    assert [request.session_id is None for request in server.replica.submitted[1:]] == [True, False, True]
    assert {request.namespace_id for request in server.replica.submitted} == {"chat"}


async def test_openais_client_reads_the_branches_to_their_end(openai_client: AsyncOpenAI, parent: str) -> None:
    texts = ["", ""]
    stream = await openai_client.post(
        FORK.removeprefix("/v1"),
        cast_to=object,
        body={**ASK, "stream": True, "branches": [{"session_id": "s"}, {"seed": 1}]},
        options={"headers": {}},
        stream=True,
        stream_cls=AsyncStream[ChatCompletionChunk],
    )
    reasons = {}
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert (len(texts[0]), len(texts[1])) == (0, 4)
    assert reasons == {0: "error", 1: "length"}


async def test_what_ends_one_branch_ends_no_other_and_leaves_no_session(http: Any, parent: str) -> None:
    taken = {"session_id": "s"}
    body = {**ASK, "branches": [taken, {"max_tokens": 500, "session_id": "long"}, {"session_id": "good"}]}
    documents = await read(http, body)
    errors = {
        each["choices"][0]["index"]: each["branch"]["error"]["code"] for each in documents if "error" in each["branch"]
    }
    assert errors == {0: "conflict", 1: "context_length_exceeded"}
    assert [each["branch"]["session_id"] for each in documents if each["branch"]["index"] == 1] == [None]
    assert set(await sessions(http)) == {"s", "good"}
    whole = await post(http, FORK, {**body, "branches": [taken, {}]})
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["error", "length"]
    assert whole["branches"][0]["error"]["param"] == "id"
    assert await log_of(http, "s") == parent


async def test_a_fault_of_ours_in_one_branch_ends_no_other(
    http: Any, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = branch_run.chat_prompt

    async def faulty(tokenizer: Any, body: Any, log: Any) -> Any:
        if body.seed == 1:
            raise ValueError("a fault")
        return await render(tokenizer, body, log)

    monkeypatch.setattr(branch_run, "chat_prompt", faulty)
    whole = await post(http, FORK, {**ASK, "branches": [{"seed": 1}, {"seed": 2, "session_id": "good"}]})
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["error", "length"]
    assert [each["session_id"] for each in whole["branches"]] == [None, "good"]
    assert set(await sessions(http)) == {"s", "good"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_of_which_no_branch_runs_is_answered_as_any_refused_one(
    http: Any, server: Any, parent: str, stream: bool
) -> None:
    body = {**ASK, "branches": [{"max_tokens": 500}, {"max_tokens": 400}], "stream": stream}
    assert (await post(http, FORK, body, status=400))["error"]["code"] == "context_length_exceeded"
    server.replica.error = {"error": "OverQuota", "error_message": "no room", "retry_after_s": 2.0}
    assert (await post(http, FORK, {**ASK, "branches": [{}, {}], "stream": stream}, status=429))["error"]
    await server.turns.stop()
    assert set(await sessions(http)) == {"s"}


async def test_a_client_that_leaves_ends_all_branches(http: Any, server: Any, parent: str) -> None:
    body = {**ASK, "max_tokens": 50, "stream": True, "branches": [{}, {"keep": False}, {}]}
    async with http.stream("POST", FORK, json=body) as response:
        async for line in response.aiter_lines():
            if '"content":"' in line and '"content":""' not in line:
                break
    await server.cluster.settle(lambda: not server.replica.running and server.turns.num_open == 0)
    await server.turns.stop()
    assert set(await sessions(http)) == {"s"}
    assert server.value("remora_generations_in_flight", model="tiny", namespace="chat") == 0


async def test_what_no_pool_has_of_the_common_prompt_is_computed_once_before(
    http: Any, server: Any, parent: str
) -> None:
    server.pools.has_blocks = False
    server.paused = True
    body = {"branches": [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two")], "max_tokens": 2}
    running = asyncio.create_task(post(http, FORK, body))
    await server.cluster.settle(lambda: bool(server.replica.running))
    (common,) = server.replica.submitted[1:]
    assert bytes(common.prompt_token_ids).decode() == f"{parent}\nuser: "[: len(parent + "\nuser: ") // 4 * 4]
    assert (common.session_id, common.sampling.max_tokens) == (None, 1)
    server.paused = False
    document = await running
    assert [choice["finish_reason"] for choice in document["choices"]] == ["length"] * 2
    assert len(server.replica.submitted) == 4
    assert document["usage"]["completion_tokens"] == 4


async def test_prompts_make_text_completions_from_the_first_tokens_of_the_log(
    http: Any, server: Any, parent: str
) -> None:
    body = {"num_tokens": 6, "max_tokens": 2, "logprobs": 1, "branches": [{"prompt": "a"}, {"prompt": [98]}]}
    document = await post(http, FORK, {**body, "keep": False})
    assert document["object"] == "text_completion"
    assert [len(choice["text"]) for choice in document["choices"]] == [2, 2]
    assert [len(choice["logprobs"]["tokens"]) for choice in document["choices"]] == [2, 2]
    asked = [bytes(request.prompt_token_ids).decode() for request in server.replica.submitted[1:]]
    assert asked == [f"{parent[:6]}a", f"{parent[:6]}b"]
    documents = await read(http, body)
    assert {each["object"] for each in documents} == {"text_completion"}
    assert [each["num_turns"] for name, each in (await sessions(http)).items() if name != "s"] == [2, 2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"branches": []}, "branches"),
        ({"branches": [{}]}, "messages"),
        ({**ASK, "branches": [{}, {"temperature": 3}]}, "branches.1.temperature"),
        ({**ASK, "temperature": 3, "branches": [{}]}, "temperature"),
        ({**ASK, "branches": [{"what": 1}]}, "branches.0.what"),
        ({**ASK, "branches": [{"n": 2}]}, "branches.0.n"),
        ({**ASK, "branches": [{"stream": True}]}, "branches.0.stream"),
        ({**ASK, "branches": [{"keep": 1}]}, "branches.0.keep"),
        ({**ASK, "branches": [{"session_id": "a b"}]}, "branches.0.session_id"),
        ({**ASK, "branches": [{"session_id": "x"}, {"session_id": "x"}]}, "branches.1.session_id"),
        ({**ASK, "branches": [{}], "id": "x"}, "id"),
        ({**ASK, "branches": [{}], "num_tokens": 1000}, "num_tokens"),
        ({**ASK, "branches": [{}], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"keep": False}, "keep"),
        ({"temperature": 1}, "temperature"),
    ],
)
async def test_refusals_name_the_field_and_its_branch(http: Any, parent: str, body: Any, param: str) -> None:
    error = (await post(http, FORK, body, status=400))["error"]
    assert error["param"] == param, error
    assert set(await sessions(http)) == {"s"}


async def test_branches_of_a_session_whose_namespace_is_gone_say_so(
    http: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await post(http, "/v1/sessions", {"id": "s", "model": "tiny", "namespace": "chat"})
    catalog = server.core.catalog
    monkeypatch.delitem(catalog.namespaces, "chat")
    monkeypatch.setitem(catalog.namespaces_of, "tiny", tuple(set(catalog.namespaces_of["tiny"]) - {"chat"}))
    answer = await post(http, FORK, {**ASK, "branches": [{}, {"keep": False}]}, status=404)
    assert answer["error"]["param"] == "namespace"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"branches": [{}, {"model": "none"}]}, "branches.1.model"),
        ({"branches": [{}, {"model": "other", "namespace": "chat"}]}, "branches.1.namespace"),
        ({"model": "none", "branches": [{}]}, "model"),
    ],
)
async def test_models_of_branches_that_do_not_exist_are_named(http: Any, parent: str, body: Any, param: str) -> None:
    error = (await post(http, FORK, {**ASK, **body}, status=404))["error"]
    assert error["param"] == param, error
    assert set(await sessions(http)) == {"s"}


async def test_branches_of_a_missing_session_are_not_found(http: Any) -> None:
    assert (await post(http, FORK, {**ASK, "branches": [{}]}, status=404))["error"]["param"] == "session_id"
