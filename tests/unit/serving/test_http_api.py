"""The HTTP API on a fake replica: shapes, streams, usage, as the official client sees them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from remora.platform.base.errors import Conflict

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 1}


async def sse(http: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """All documents of a stream, "[DONE]" included."""
    documents = []
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                documents.append("[DONE]" if line == "data: [DONE]" else json.loads(line[6:]))
    return documents


async def test_the_openai_client_gets_a_chat_answer_whole_and_streamed(openai_client: Any) -> None:
    whole = await openai_client.chat.completions.create(**CHAT)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].message.content) == 6
    assert whole.usage.prompt_tokens == len("user: hello\nassistant: ")
    assert whole.usage.completion_tokens == 6
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 6
    assert whole.usage.prompt_tokens_details.cached_tokens == 4
    stream = await openai_client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_openai_client_gets_completions_of_text_lists_and_token_ids(openai_client: Any) -> None:
    one = await openai_client.completions.create(model="tiny", prompt="abc", max_tokens=3, seed=1)
    ids = await openai_client.completions.create(model="tiny", prompt=[97, 98, 99], max_tokens=3, seed=1)
    assert one.choices[0].text == ids.choices[0].text
    many = await openai_client.completions.create(model="tiny", prompt=["abc", "xyzz"], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == one.choices[0].text
    assert many.choices[0].text != many.choices[1].text
    assert many.usage.prompt_tokens == 7
    assert many.usage.completion_tokens == 12
    lists = await openai_client.completions.create(model="tiny", prompt=[[97, 98, 99], [1]], max_tokens=3, seed=1)
    assert lists.choices[0].text == one.choices[0].text
    stream = await openai_client.completions.create(
        model="tiny", prompt=["abc", "xyzz"], n=2, max_tokens=3, seed=1, stream=True
    )
    texts = [""] * 4
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in many.choices]


async def test_sixteen_tokens_are_the_default_of_completions_and_the_context_of_chat(openai_client: Any) -> None:
    completion = await openai_client.completions.create(model="tiny", prompt="abc")
    assert completion.usage.completion_tokens == 16
    chat = await openai_client.chat.completions.create(model="tiny", messages=CHAT["messages"])
    assert chat.usage.total_tokens == 200


async def test_every_stream_ends_with_done_and_has_usage_only_when_asked(http: Any) -> None:
    documents = await sse(http, "/v1/chat/completions", CHAT)
    assert documents[-1] == "[DONE]"
    assert all("usage" not in document for document in documents[:-1])
    documents = await sse(http, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2})
    assert documents[-1] == "[DONE]"
    assert [document["choices"][0]["finish_reason"] for document in documents[:-1]] == [None, "length"]


async def test_case_07_n_choices_of_one_seed_differ_and_repeat(http: Any) -> None:
    body = {**CHAT, "n": 3, "seed": 7, "temperature": 1}
    first, second = [(await http.post("/v1/chat/completions", json=body)).json() for _ in range(2)]
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] <= first["usage"]["prompt_tokens"]


async def test_chat_logprobs_have_openais_shape(openai_client: Any) -> None:
    whole = await openai_client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    content = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    assert [entry.bytes for entry in content] == [list(entry.token.encode()) for entry in content]
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in content)
    stream = await openai_client.chat.completions.create(**CHAT, logprobs=True, stream=True)
    streamed = [
        entry.token
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == [entry.token for entry in content]


async def test_completion_logprobs_have_openais_shape(http: Any) -> None:
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "logprobs": 2, "seed": 1}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    documents = await sse(http, "/v1/completions", body)
    offsets = [each for document in documents[:-1] for each in document["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3]


async def test_echo_puts_the_prompt_before_every_choice(http: Any) -> None:
    body = {"model": "tiny", "prompt": ["ab", [99, 100]], "max_tokens": 2, "seed": 1}
    plain = (await http.post("/v1/completions", json=body)).json()
    echoed = (await http.post("/v1/completions", json={**body, "echo": True})).json()
    assert [choice["text"] for choice in echoed["choices"]] == [
        prompt + choice["text"] for prompt, choice in zip(["ab", "cd"], plain["choices"], strict=True)
    ]
    documents = await sse(http, "/v1/completions", {**body, "echo": True})
    texts = ["", ""]
    for document in documents[:-1]:
        texts[document["choices"][0]["index"]] += document["choices"][0]["text"]
    assert texts == [choice["text"] for choice in echoed["choices"]]


async def test_tokenize_and_detokenize_are_inverse(http: Any) -> None:
    answer = (await http.post("/tokenize", json={"model": "tiny", "prompt": "héllo", "return_token_strs": True})).json()
    assert answer["tokens"] == list("héllo".encode())
    assert answer["count"] == 6
    assert answer["max_model_len"] == 200
    assert answer["token_strs"][0] == "h"
    text = (await http.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]})).json()
    assert text == {"prompt": "héllo"}
    chat = (await http.post("/tokenize", json={"model": "tiny", "messages": CHAT["messages"]})).json()
    assert bytes(chat["tokens"]).decode() == "user: hello\nassistant: "


async def test_long_texts_are_tokenized_without_stopping_the_loop(http: Any, server: Any) -> None:
    answer = await http.post("/tokenize", json={"model": "tiny", "prompt": "x" * 10_000})
    assert answer.json()["count"] == 10_000


async def test_models_are_listed_with_their_readiness(http: Any, openai_client: Any) -> None:
    listed = {model.id: model async for model in openai_client.models.list()}
    assert set(listed) == {"tiny", "other"}
    assert listed["tiny"].ready is True
    assert listed["other"].ready is False
    assert (await openai_client.models.retrieve("tiny")).id == "tiny"
    assert (await http.get("/health")).json() == {"status": "ok"}
    ready = await http.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["missing"] == ["other"]


async def test_operators_see_namespaces_replicas_and_metrics(http: Any) -> None:
    await http.post("/v1/chat/completions", json=CHAT)
    namespaces = {each["id"]: each for each in (await http.get("/v1/namespaces")).json()["data"]}
    assert set(namespaces) == {"chat", "batch/team-a", "other"}
    assert namespaces["chat"]["guaranteed_bytes"] == 2**20
    assert (await http.get("/v1/namespaces/batch/team-a")).json() == namespaces["batch/team-a"]
    missing = await http.get("/v1/namespaces/batch/team-b")
    assert missing.status_code == 404
    assert "one of: batch/team-a, chat, other" in missing.json()["error"]["message"]
    (replica,) = (await http.get("/v1/replicas")).json()["data"]
    assert replica["id"] == "a"
    assert replica["connected"] is True
    assert replica["card"]["max_model_len"] == 200
    page = (await http.get("/metrics")).text
    assert 'remora_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in page
    assert 'remora_output_tokens_total{model="tiny",namespace="chat"} 6.0' in page
    assert 'remora_engine_running_sequences{model="tiny",replica="a"} 0.0' in page
    assert 'remora_engine_step_seconds_bucket{le="+Inf",model="tiny",replica="a"} 6.0' in page
    assert 'remora_model_ready{model="other"} 0.0' in page


async def test_the_namespace_comes_from_the_header_or_the_body(http: Any, server: Any) -> None:
    await http.post("/v1/chat/completions", json={**CHAT, "namespace": "batch/team-a"})
    await http.post("/v1/chat/completions", json=CHAT, headers={"X-Remora-Namespace": "batch/team-a"})
    await http.post("/v1/chat/completions", json=CHAT)
    assert [request.namespace_id for request in server.replica.submitted] == ["batch/team-a", "batch/team-a", "chat"]


async def test_a_request_reaches_the_engine_with_all_it_asked_for(http: Any, server: Any) -> None:
    await http.post(
        "/v1/chat/completions",
        json={
            **CHAT, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
            "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"97": -5}, "stop": "!",
            "stop_token_ids": [3], "min_tokens": 2, "ignore_eos": True, "priority": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        },
    )  # fmt: skip
    (request,) = server.replica.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert sampling.logit_bias == ((97, -5.0),)
    assert (sampling.stop, sampling.stop_token_ids, sampling.seed) == (("!",), (3,), 1)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (2, 6, True)
    assert request.priority == -3
    assert json.loads(request.grammar.text) == {"type": "object"}
    assert len(request.block_hashes) == len(request.prompt_token_ids) // 4


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_request(http: Any, server: Any, path: str, stream: bool) -> None:
    server.step_s = 0.01
    body = {"model": "tiny", "max_tokens": 150, "stream": stream}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT["messages"]}

    async def read() -> None:
        async with http.stream("POST", path, json=body) as response:
            async for _ in response.aiter_lines():
                pass

    reading = asyncio.create_task(read())
    # A client that left before its request was there would leave nothing to be freed.
    await server.cluster.settle(lambda: server.replica.running)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await server.cluster.settle(lambda: server.core.num_open == 0 and not server.replica.running, timeout_s=1)
    assert server.value("remora_generations_total", model="tiny", namespace="chat", outcome="disconnected") == 1
    assert server.value("remora_generations_in_flight", model="tiny", namespace="chat") == 0
    server.core.check_integrity()


async def test_a_client_that_leaves_while_queued_frees_its_request(http: Any, server: Any) -> None:
    server.paused = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    await server.cluster.settle(lambda: server.core.num_open == 0 and not server.replica.running, timeout_s=1)


async def test_a_stream_outlives_its_replica(http: Any, server: Any, make_replica: Any) -> None:
    server.step_s = 0.02
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "seed": 5}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    reading = asyncio.create_task(sse(http, "/v1/completions", body))
    await server.cluster.settle(lambda: server.core.num_open == 1)
    (stream,) = server.core._streams.values()
    await server.cluster.settle(lambda: stream.log.num_tokens > 3)
    dying, server.replica = server.replica, make_replica("heir")
    dying.kill()
    await server.cluster.add(server.replica)
    documents = await reading
    assert "".join(document["choices"][0]["text"] for document in documents[:-1]) == whole
    assert "error" not in documents[-2]


def without_failover(server: Any) -> None:
    models = server.core.catalog.models
    models["tiny"] = models["tiny"].model_copy(update={"failover": False})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_without_failover_a_stream_says_the_same_and_ends_with_its_replica(
    http: Any, server: Any, make_replica: Any, path: str
) -> None:
    body = {**(CHAT if path == "/v1/chat/completions" else {"model": "tiny", "prompt": "abc"}), "max_tokens": 20}
    body["seed"] = 5
    before = await sse(http, path, body)
    without_failover(server)
    shown = [
        [(each["object"], each["choices"]) for each in said[:-1]] for said in (before, await sse(http, path, body))
    ]
    assert shown[0] == shown[1]
    server.step_s = 0.02
    reading = asyncio.create_task(sse(http, path, body))
    await server.cluster.settle(lambda: server.core.num_open == 1)
    (stream,) = server.core._streams.values()
    await server.cluster.settle(lambda: stream.log.num_tokens > 3)
    other = make_replica("other")
    await server.cluster.add(other)
    with pytest.raises(Conflict, match="failover"):
        await server.core.moves.move(stream, other.replica_id)
    server.replica.kill()
    *_, last, done = await reading
    assert done == "[DONE]"
    assert (last["error"]["code"], "failover" in last["error"]["message"]) == ("unavailable", True)
    assert not other.submitted


async def test_without_failover_a_whole_answer_still_outlives_its_replica(
    http: Any, server: Any, make_replica: Any
) -> None:
    without_failover(server)
    server.paused = True
    asked = asyncio.create_task(http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 9}))
    await server.cluster.settle(lambda: server.replica.running)
    await server.replica.step(3)
    dying, server.replica = server.replica, make_replica("heir")
    dying.kill()
    await server.cluster.add(server.replica)
    server.paused = False
    assert (await asked).json()["usage"]["completion_tokens"] == 9


async def test_the_callers_trace_context_is_passed_on(http: Any, server: Any) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    response = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert trace_id in server.replica.submitted[0].trace_context["traceparent"]
    assert response.headers["x-remora-trace-id"] == trace_id


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_template_arguments_of_a_request_are_taken(http: Any, path: str) -> None:
    body = {"model": "tiny", "messages": CHAT["messages"], "chat_template_kwargs": {"enable_thinking": False}}
    response = await http.post(path, json=body | ({"max_tokens": 1} if path != "/tokenize" else {}))
    assert response.status_code == 200, response.text
