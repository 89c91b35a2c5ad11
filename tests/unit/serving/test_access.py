"""With API keys nobody gets in without one, and a tenant sees its own namespaces, sessions and traces and no others."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError, NotFoundError, PermissionDeniedError, RateLimitError

from remora.platform.base import telemetry
from remora.platform.base.config import RemoraConfig, TelemetryConfig, parse_config
from remora.platform.base.tenants import key_hash, new_key

KEYS = {name: new_key() for name in ("a", "b", "one", "rare", "short", "ops")}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def config() -> RemoraConfig:
    def tenant(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "key_sha256": [key_hash(KEYS[name])], **more}

    return parse_config(
        {
            "http": {"host": "0.0.0.0", "queue_timeout_s": 1.0},
            "models": [{"name": "tiny", "source": "unused"}, {"name": "other", "source": "unused"}],
            "namespaces": [
                {"name": "chat/a", "model": "tiny", "tenant": "a"},
                {"name": "batch/a", "model": "tiny", "tenant": "a"},
                {"name": "chat/b", "model": "tiny", "tenant": "b"},
                *({"name": f"chat/{name}", "model": "tiny", "tenant": name} for name in ("one", "rare", "short")),
                {"name": "other", "model": "other"},
            ],
            "tenants": [
                tenant("a"),
                tenant("b"),
                tenant("one", limits={"max_concurrent": 1}),
                tenant("rare", limits={"requests_per_s": 0.01}),
                tenant("short", limits={"tokens_per_min": 60}),
                tenant("ops", operator=True),
            ],
        }
    )


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


async def ask(http: httpx.AsyncClient, who: str, method: str, path: str, body: Any = None) -> httpx.Response:
    return await http.request(method, path, json=body, headers=bearer(who))


async def names(http: httpx.AsyncClient, who: str, path: str, key: str = "id") -> list[str]:
    response = await ask(http, who, "GET", path)
    assert response.status_code == 200, response.text
    return [each[key] for each in response.json()["data"]]


def routes(server: Any) -> list[tuple[str, str]]:
    """Method and an example path of every documented route."""
    paths = server._server.config.app.openapi()["paths"]
    found = [(method.upper(), re.sub(r"{.*?}", "x", path)) for path, methods in paths.items() for method in methods]
    assert len(found) > 25
    return found


async def test_no_route_but_the_open_ones_answers_without_a_key(server: Any, http: httpx.AsyncClient) -> None:
    answered = set()
    for method, path in routes(server):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEYS['ops']}"}):
            response = await http.request(method, path, headers=headers)
            if response.status_code != 401:
                answered.add(path)
    assert answered == {"/health", "/ready"}
    for path in ("/ui/", "/ui/main.js", "/docs", "/openapi.json"):
        assert (await http.get(path)).status_code == 200


async def test_refusals_are_openais(server: Any, http: httpx.AsyncClient) -> None:
    async def client(key: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)

    with pytest.raises(AuthenticationError) as unknown:
        await (await client("sk-nothing")).models.list()
    assert unknown.value.code == "invalid_api_key"
    assert unknown.value.response.headers["www-authenticate"] == "Bearer"
    with pytest.raises(NotFoundError) as absent:
        await (await client(KEYS["a"])).chat.completions.create(model="other", **CHAT)  # type: ignore[call-overload]
    assert absent.value.code == "model_not_found"
    assert "other" not in str(absent.value).partition("one of: ")[2]
    with pytest.raises(PermissionDeniedError) as forbidden:
        await (await client(KEYS["a"])).get("/pools", cast_to=object)
    assert forbidden.value.code == "insufficient_permissions"
    assert KEYS["a"] not in (await http.get("/v1/models", headers={"authorization": f"Bearer {KEYS['a']}x"})).text


async def test_tenants_may_do_what_is_theirs_and_nothing_that_is_new_or_the_operators(
    server: Any, http: httpx.AsyncClient
) -> None:
    allowed = {(m, p) for m, p in routes(server) if (await ask(http, "a", m, p)).status_code != 403}
    assert {path for _, path in allowed} == {
        "/health", "/ready",
        "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/x",
        "/v1/namespaces", "/v1/namespaces/x", "/v1/traces", "/v1/traces/x", "/v1/sessions", "/v1/sessions/x",
        "/v1/sessions/x/fork", "/v1/sessions/x/truncate", "/v1/sessions/x/pin", "/v1/sessions/x/unpin",
    }  # fmt: skip
    assert ("GET", "/v1/namespaces/x") in allowed
    assert not {(m, p) for m, p in allowed if p == "/v1/namespaces/x" and m != "GET"}
    for method, path in routes(server):
        assert (await ask(http, "ops", method, path)).status_code not in (401, 403), path


async def test_models_and_namespaces_are_the_tenants_own(http: httpx.AsyncClient) -> None:
    assert await names(http, "a", "/v1/models") == ["tiny"]
    assert await names(http, "ops", "/v1/models") == ["tiny", "other"]
    assert await names(http, "a", "/v1/namespaces") == ["chat/a", "batch/a"]
    assert await names(http, "b", "/v1/namespaces") == ["chat/b"]
    assert len(await names(http, "ops", "/v1/namespaces")) == 7
    model = (await ask(http, "b", "GET", "/v1/models/tiny")).json()
    assert model["namespaces"] == ["chat/b"]
    assert (await ask(http, "b", "GET", "/v1/namespaces/chat/b")).status_code == 200
    assert (await ask(http, "b", "GET", "/v1/namespaces/chat/a")).status_code == 404
    assert (await ask(http, "b", "POST", "/tokenize", {"model": "other", "prompt": "x"})).status_code == 404


async def test_a_request_pays_in_the_tenants_namespace_and_cannot_name_anothers(
    server: Any, http: httpx.AsyncClient
) -> None:
    for who, namespace in (("a", "chat/a"), ("b", "chat/b"), ("ops", "chat/a")):
        response = await ask(http, who, "POST", "/v1/chat/completions", {"model": "tiny", **CHAT})
        assert response.status_code == 200, response.text
        assert server.replica.submitted[-1].namespace_id == namespace
    named = {"model": "tiny", "namespace": "chat/a", **CHAT}
    response = await ask(http, "b", "POST", "/v1/chat/completions", named)
    assert (response.status_code, response.json()["error"]["param"]) == (404, "namespace")
    assert "chat/a'" not in response.json()["error"]["message"].partition("one of")[2]
    header = {**bearer("b"), "x-remora-namespace": "chat/a"}
    assert (await http.post("/v1/chat/completions", json={"model": "tiny", **CHAT}, headers=header)).status_code == 404


async def test_a_tenant_cannot_put_itself_before_others(http: httpx.AsyncClient) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/sessions", {})):
        refused = await ask(http, "a", "POST", path, {"model": "tiny", "priority": -1, **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert (await ask(http, "a", "POST", path, {"model": "tiny", "priority": 1, **body})).status_code == 200
        assert (await ask(http, "ops", "POST", path, {"model": "tiny", "priority": -1, **body})).status_code == 200


async def test_sessions_of_others_do_not_exist(http: httpx.AsyncClient) -> None:
    for who in ("a", "b"):
        made = await ask(http, who, "POST", "/v1/sessions", {"model": "tiny", "id": f"trip-{who}"})
        assert made.json()["namespace"] == f"chat/{who}"
    await ask(http, "a", "POST", "/v1/sessions", {"model": "tiny", "id": "zug-a", "namespace": "batch/a"})
    assert await names(http, "a", "/v1/sessions") == ["trip-a", "zug-a"]
    assert await names(http, "a", "/v1/sessions?limit=1") == ["trip-a"]
    assert (await ask(http, "a", "GET", "/v1/sessions?limit=1")).json()["has_more"] is True
    assert await names(http, "a", "/v1/sessions?limit=1&after=trip-a") == ["zug-a"]
    assert await names(http, "b", "/v1/sessions") == ["trip-b"]
    assert await names(http, "b", "/v1/sessions?namespace=chat/a") == []
    assert await names(http, "ops", "/v1/sessions") == ["trip-a", "trip-b", "zug-a"]
    turn = {"model": "tiny", "session_id": "trip-a", **CHAT}
    before = (await ask(http, "a", "GET", "/v1/sessions/trip-a")).json()
    for method, path, body in (
        ("GET", "/v1/sessions/trip-a", None),
        ("DELETE", "/v1/sessions/trip-a", None),
        ("POST", "/v1/sessions/trip-a/fork", {}),
        ("POST", "/v1/sessions/trip-a/truncate", {"num_tokens": 0}),
        ("POST", "/v1/sessions/trip-a/pin", {}),
        ("POST", "/v1/chat/completions", turn),
    ):
        refused = await ask(http, "b", method, path, body)
        assert refused.status_code == 404, path
        absent = await ask(http, "b", method, path.replace("trip-a", "nothing"), body)
        if body is not turn:
            assert refused.json()["error"]["message"].replace("trip-a", "nothing") == absent.json()["error"]["message"]
    after = (await ask(http, "a", "GET", "/v1/sessions/trip-a")).json()
    assert {name: after[name] for name in ("epoch", "version", "num_tokens", "pinned")} == {
        name: before[name] for name in ("epoch", "version", "num_tokens", "pinned")
    }
    assert (await ask(http, "a", "POST", "/v1/chat/completions", turn)).status_code == 200
    assert (await ask(http, "a", "GET", "/v1/sessions/trip-a")).json()["num_turns"] == 1


async def test_traces_of_others_do_not_exist(server: Any, http: httpx.AsyncClient, tmp_path: Any) -> None:
    telemetry.shutdown_telemetry()
    telemetry.setup_telemetry("router", TelemetryConfig(), tmp_path)
    try:
        trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
        shared = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
        for who in ("a", "b"):
            body = {"model": "tiny", **CHAT}
            await http.post("/v1/chat/completions", json=body, headers={**bearer(who), **shared})
        assert telemetry.flush_telemetry()
        assert await names(http, "a", "/v1/traces", "namespace") == ["chat/a"]
        assert await names(http, "b", "/v1/traces?namespace=chat/a") == []
        assert sorted(await names(http, "ops", "/v1/traces", "namespace")) == ["chat/a", "chat/b"]
        own = (await ask(http, "a", "GET", f"/v1/traces/{trace_id}")).json()["spans"]
        assert {span["attributes"]["remora.namespace"] for span in own} == {"chat/a"}
        assert len((await ask(http, "ops", "GET", f"/v1/traces/{trace_id}")).json()["spans"]) == 2 * len(own)
        assert (await ask(http, "one", "GET", f"/v1/traces/{trace_id}")).status_code == 404
    finally:
        telemetry.shutdown_telemetry()


async def test_a_tenant_at_its_limits_gets_429_that_names_the_limit(server: Any, http: httpx.AsyncClient) -> None:
    body = {"model": "tiny", **CHAT}
    server.paused = True
    running = asyncio.create_task(ask(http, "one", "POST", "/v1/chat/completions", body))
    await server.cluster.settle(lambda: bool(server.replica.running))
    refused = {"max_concurrent": await ask(http, "one", "POST", "/v1/chat/completions", body)}
    server.paused = False
    assert (await running).status_code == 200
    for who, limit in (("rare", "requests_per_s"), ("short", "tokens_per_min")):
        long = {"model": "tiny", "prompt": [65] * 70, "max_tokens": 4}
        assert (await ask(http, who, "POST", "/v1/completions", long)).status_code == 200
        refused[limit] = await ask(http, who, "POST", "/v1/completions", long)
        assert (await ask(http, who, "GET", "/v1/models")).status_code == 200, "looking is not limited"
    for limit, response in refused.items():
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (429, limit, "rate_limit_exceeded")
    waits_s = {limit: int(response.headers["retry-after"]) for limit, response in refused.items()}
    assert waits_s["max_concurrent"] == 1
    assert 90 <= waits_s["requests_per_s"] <= 100
    assert 60 <= waits_s["tokens_per_min"] <= 75, "70 of the prompt and 4 of the answer, at one a second"
    assert server.value("remora_tenant_limited_requests_total", tenant="one", limit="max_concurrent") == 1
    assert (await ask(http, "one", "POST", "/v1/chat/completions", body)).status_code == 200
    assert (await ask(http, "a", "POST", "/v1/chat/completions", body)).status_code == 200, "others are not held up"
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEYS["rare"], max_retries=0)
    with pytest.raises(RateLimitError):
        await client.completions.create(model="tiny", prompt="x")


async def test_a_generation_that_is_refused_or_left_is_not_counted_as_running(
    server: Any, http: httpx.AsyncClient
) -> None:
    for path, body, status in (
        ("/v1/chat/completions", {"model": "tiny", **CHAT, "max_tokens": 5000}, 400),
        ("/v1/chat/completions", {"model": "nothing", **CHAT}, 404),
        ("/v1/chat/completions", {"model": "tiny", **CHAT, "session_id": "nothing"}, 404),
    ):
        assert (await ask(http, "one", "POST", path, body)).status_code == status
    server.paused = True
    leaves = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=bearer("one"), timeout=0.2)
    with pytest.raises(httpx.ReadTimeout):
        await leaves
    await server.cluster.settle(lambda: not server.replica.running)
    server.paused = False
    response = await ask(http, "one", "POST", "/v1/chat/completions", {"model": "tiny", **CHAT})
    assert response.status_code == 200, response.text
