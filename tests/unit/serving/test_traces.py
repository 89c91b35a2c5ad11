"""A request is one trace, from the client's own span to a collector, also when its replica is lost under it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from remora.platform.base import telemetry
from remora.platform.base import telemetry_names as names
from remora.platform.base.config import TelemetryConfig

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 8}


class Receiver:
    """What a collector was sent."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[Any] = []

    def spans(self) -> list[Any]:
        assert telemetry.flush_telemetry()
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def grpc_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            receiver.requests.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield receiver
    server.stop(0)


@pytest.fixture
def http_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests.append(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield receiver
        server.shutdown()
        thread.join()


@pytest.fixture
async def traced(server: Any, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """The server, with its spans in the folder that it reads; in a parametrized test also sent to a receiver."""
    options = getattr(request, "param", {})
    protocol = options.get("protocol")
    receiver = request.getfixturevalue(f"{protocol}_receiver") if protocol else None
    config = TelemetryConfig(
        otlp_endpoint=receiver.endpoint if receiver else None,
        otlp_protocol=protocol or "grpc",
        capture_content=options.get("capture", False),
    )
    telemetry.shutdown_telemetry()
    telemetry.setup_telemetry("router", config, tmp_path)
    server.receiver = receiver
    yield server
    telemetry.shutdown_telemetry()


async def trace_of(http: httpx.AsyncClient, trace_id: str = TRACE_ID) -> dict[str, Any]:
    assert telemetry.flush_telemetry()
    response = await http.get(f"/v1/traces/{trace_id}")
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


@pytest.mark.parametrize("traced", [{"protocol": "grpc"}, {"protocol": "http"}], indirect=True, ids=["grpc", "http"])
async def test_a_stream_that_fails_over_is_one_trace_at_the_collector(
    traced: Any, http: httpx.AsyncClient, make_replica: Callable[..., Any]
) -> None:
    traced.paused = True

    async def begin() -> None:
        await traced.cluster.settle(lambda: bool(traced.replica.running))
        await traced.replica.step(3)

    beginning = asyncio.create_task(begin())
    async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}, headers=CALLER) as response:
        assert response.headers["x-remora-trace-id"] == TRACE_ID
        lines = response.aiter_lines()
        first = await anext(lines)
        await beginning
        second = make_replica("b")
        traced.cluster.replicas[second.replica_id] = second
        traced.replica.kill()
        traced.cluster.publish()
        await traced.cluster.settle(lambda: bool(second.running))
        traced.replica, traced.paused = second, False
        rest = [line async for line in lines if line]
    assert first.startswith("data: {")
    assert rest[-1] == "data: [DONE]"
    spans = await asyncio.to_thread(traced.receiver.spans)
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    (root,) = [span for span in spans if span.name == "chat tiny"]
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    routes = [span for span in spans if span.name == names.ROUTER_ROUTE]
    assert [span.parent_span_id for span in routes] == [root.span_id] * 2
    attributes = [{each.key: each.value for each in span.attributes} for span in routes]
    assert [each[names.REMORA_REPLICA_ID].string_value for each in attributes] == ["a", "b"]
    assert [each[names.REMORA_ROUTE_ATTEMPT].int_value for each in attributes] == [0, 1]


async def test_what_clients_write_and_models_answer_stays_out_of_spans_logs_and_metrics(
    traced: Any, http: httpx.AsyncClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = {"role": "user", "content": "canary in a chat"}
    schema = {"type": "object", "properties": {"canary": {"type": "string"}}}
    format_asked = {"type": "json_schema", "json_schema": {"name": "canary", "schema": schema}}
    answers = []
    for path, body in (
        ("/v1/chat/completions", {**BODY, "messages": [said]}),
        ("/v1/chat/completions", {**BODY, "messages": [said], "stop": ["canary"], "stream": True}),
        ("/v1/chat/completions", {**BODY, "messages": [said], "response_format": format_asked}),
        ("/v1/chat/completions", {**BODY, "messages": [{"role": "canary", "content": "canary"}]}),
        ("/v1/chat/completions", {**BODY, "messages": [said], "max_tokens": 50_000}),
        ("/v1/chat/completions", {**BODY, "messages": [said], "temperature": "canary"}),
        ("/v1/completions", {"model": "tiny", "prompt": ["canary", "another canary"], "max_tokens": 4}),
        ("/v1/completions", {"model": "tiny", "prompt": "canary", "max_tokens": 4, "min_tokens": 9}),
        ("/v1/sessions", {"model": "tiny", "id": "trip"}),
        ("/v1/chat/completions", {**BODY, "messages": [said], "session_id": "trip"}),
        ("/tokenize", {"model": "tiny", "prompt": "canary"}),
    ):
        answers.append(await http.post(path, json=body))
    assert {each.status_code for each in answers} == {200, 400}
    said_back = answers[0].json()["choices"][0]["message"]["content"]
    assert telemetry.flush_telemetry()
    written = "".join(path.read_text() for path in (tmp_path / "traces").glob("*.jsonl"))
    assert written.count("chat tiny") >= 5
    for text in (written, caplog.text, (await http.get("/metrics")).text):
        assert "canary" not in text
        assert said_back not in text


async def test_a_request_says_what_was_asked_and_how_it_ended(traced: Any, http: httpx.AsyncClient) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "n": 2}
    await http.post("/v1/chat/completions", json={**BODY, **asked}, headers=CALLER)
    root = (await trace_of(http))["spans"][0]["attributes"]
    expected = {
        names.GEN_AI_OPERATION_NAME: "chat",
        names.GEN_AI_PROVIDER_NAME: "remora",
        names.GEN_AI_REQUEST_MODEL: "tiny",
        names.GEN_AI_RESPONSE_MODEL: "tiny",
        names.GEN_AI_REQUEST_STREAM: False,
        names.GEN_AI_REQUEST_CHOICE_COUNT: 2,
        names.GEN_AI_REQUEST_MAX_TOKENS: 8,
        names.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        names.GEN_AI_REQUEST_TOP_P: 0.9,
        names.GEN_AI_REQUEST_TOP_K: 7,
        names.GEN_AI_REQUEST_SEED: 3,
        names.GEN_AI_RESPONSE_FINISH_REASONS: ["length", "length"],
        names.GEN_AI_USAGE_OUTPUT_TOKENS: 16,
        names.REMORA_NAMESPACE: "chat",
    }
    assert {name: root.get(name) for name in expected} == expected
    assert root[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] > 0


async def test_prompts_and_answers_are_in_spans_when_asked_for(
    cluster: Any, config: Any, server: Any, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    asked = config.telemetry.model_copy(update={"capture_content": True})
    object.__setattr__(server.core.config, "telemetry", asked)
    telemetry.setup_telemetry("router", asked, tmp_path)
    try:
        response = await http.post("/v1/chat/completions", json=BODY, headers=CALLER)
        root = (await trace_of(http))["spans"][0]["attributes"]
    finally:
        telemetry.shutdown_telemetry()
    answer = response.json()["choices"][0]["message"]["content"]
    (asked_message,) = json.loads(root[names.GEN_AI_INPUT_MESSAGES])
    (said_message,) = json.loads(root[names.GEN_AI_OUTPUT_MESSAGES])
    assert asked_message == {"role": "user", "parts": [{"type": "text", "content": "a secret"}]}
    assert said_message == {"role": "assistant", "parts": [{"type": "text", "content": answer}]}


async def test_replicas_are_told_which_unsampled_traces_are_kept(
    server: Any, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    def keep(trace_id: str) -> None:
        for connection in server.core.fleet.connections():
            connection.keep_trace(trace_id)

    config = TelemetryConfig(sample_ratio=0.0, keep_slow_s=1000)
    telemetry.shutdown_telemetry()
    telemetry.setup_telemetry("router", config, tmp_path, requests_begin_here=True, on_kept=keep)
    try:
        good = await http.post("/v1/chat/completions", json=BODY)
        bad = await http.post("/v1/chat/completions", json={**BODY, "max_tokens": 5000})
        assert (good.status_code, bad.status_code) == (200, 400)
        assert telemetry.flush_telemetry()
        (listed,) = (await http.get("/v1/traces")).json()["data"]
        await server.cluster.settle(lambda: bool(server.replica.wanted_traces))
    finally:
        telemetry.shutdown_telemetry()
    assert server.replica.wanted_traces == [listed["id"]]


async def test_traces_are_listed_by_namespace_session_and_duration(traced: Any, http: httpx.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json=BODY)
    await http.post("/v1/chat/completions", json={**BODY, "namespace": "batch/team-a"})
    await http.post("/v1/sessions", json={"model": "tiny", "id": "trip"})
    await http.post("/v1/chat/completions", json={**BODY, "session_id": "trip"})
    refused = await http.post("/v1/chat/completions", json={**BODY, "max_tokens": 5000})
    assert refused.status_code == 400
    assert telemetry.flush_telemetry()

    async def listed(**query: Any) -> list[dict[str, Any]]:
        return (await http.get("/v1/traces", params=query)).json()["data"]  # type: ignore[no-any-return]

    everything = await listed()
    assert [each["namespace"] for each in everything] == ["chat", "chat", "batch/team-a", "chat"]
    assert [each["session"] for each in everything] == [None, "trip", None, None]
    assert all(each["complete"] for each in everything)
    assert everything[-1]["output_tokens"] == 8
    assert everything[-1]["input_tokens"] > 8
    assert [each["namespace"] for each in await listed(namespace="batch/team-a")] == ["batch/team-a"]
    assert [each["session"] for each in await listed(session="trip")] == ["trip"]
    (failed,) = await listed(failed="true")
    assert failed["error_type"] == "ContextLengthExceeded"
    slowest = max(each["duration_ms"] for each in everything)
    assert len(await listed(min_ms=slowest - 0.001)) == 1
    assert await listed(min_ms=slowest + 1) == []
    assert len(await listed(limit=2)) == 2


@pytest.mark.parametrize(
    ("query", "field"), [({"min_ms": "-1"}, "min_ms"), ({"limit": "0"}, "limit"), ({"colour": "red"}, "colour")]
)
async def test_a_wrong_query_is_refused_by_name(http: httpx.AsyncClient, query: dict[str, str], field: str) -> None:
    response = await http.get("/v1/traces", params=query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_a_trace_that_is_not_there_is_404(http: httpx.AsyncClient) -> None:
    assert (await http.get(f"/v1/traces/{TRACE_ID}")).status_code == 404


async def test_a_moved_request_stays_one_trace_of_its_namespace(
    traced: Any, http: httpx.AsyncClient, make_replica: Callable[..., Any]
) -> None:
    await traced.cluster.add(make_replica("b"))
    await http.post("/v1/sessions", json={"model": "tiny", "id": "trip"})
    traced.paused = True
    body = {**BODY, "session_id": "trip"}
    running = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=CALLER))
    replicas = list(traced.cluster.replicas.values())
    await traced.cluster.settle(lambda: any(each.running for each in replicas))
    (source,) = [each for each in replicas if each.running]
    (target,) = [each for each in replicas if each is not source]
    await source.step(2)
    move = {"to": {"replica": target.replica_id}}
    moving = asyncio.create_task(http.post("/v1/sessions/trip/migrate", json=move))
    await traced.cluster.settle(lambda: bool(target.running))
    traced.replica, traced.paused = target, False
    assert (await moving).status_code == 200
    assert (await running).status_code == 200
    names_of_spans = [span["name"] for span in (await trace_of(http))["spans"]]
    assert {"chat tiny", names.MIGRATE_FREEZE, names.MIGRATE_COMMIT} < set(names_of_spans)
    (listed,) = (await http.get("/v1/traces")).json()["data"]
    assert listed["replicas"] == [source.replica_id, target.replica_id]
    assert (listed["id"], listed["namespace"], listed["num_spans"]) == (TRACE_ID, "chat", len(names_of_spans))


async def test_a_fork_with_branches_is_a_trace_of_its_parent_and_of_each_branch(
    traced: Any, http: httpx.AsyncClient, make_replica: Callable[..., Any]
) -> None:
    await http.post("/v1/sessions", json={"model": "tiny", "id": "trip"})
    fork = {**BODY, "branches": [{"session_id": "one"}, {"session_id": "two"}, {"keep": False}]}
    fork.pop("model", None)
    assert (await http.post("/v1/sessions/trip/fork", json=fork, headers=CALLER)).status_code == 200
    assert [span["name"] for span in (await trace_of(http))["spans"]].count("chat tiny") == 3
    for session in ("trip", "one", "two"):
        (listed,) = (await http.get("/v1/traces", params={"session": session})).json()["data"]
        assert (listed["id"], listed["name"], listed["session"]) == (TRACE_ID, "fork tiny", "trip")
        assert listed["session_replicas"] == {"trip": [], "one": ["a"], "two": ["a"]}
    assert (await http.get("/v1/traces", params={"session": "three"})).json()["data"] == []
