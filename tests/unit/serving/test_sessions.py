"""Sessions over HTTP on a fake replica: what it is asked to compute, and what stays in the log."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from remora.deployments.router import MAX_LOST_ATTEMPTS
from remora.namespaces.session_log import EPOCHS_PER_TURN
from remora.platform.base.errors import Unavailable

BASE = {"model": "tiny", "max_tokens": 4, "seed": 1}


async def post(http: Any, path: str, body: dict[str, Any] | None = None, *, status: int = 200) -> Any:
    response = await http.post(path, json=body or {})
    assert response.status_code == status, response.text
    return response.json()


async def create(http: Any, name: str = "s", **more: Any) -> Any:
    return await post(http, "/v1/sessions", {"id": name, "model": "tiny", **more})


async def chat(http: Any, content: str, name: str = "s", *, status: int = 200, **more: Any) -> Any:
    body = {**BASE, "session_id": name, "messages": [{"role": "user", "content": content}], **more}
    return await post(http, "/v1/chat/completions", body, status=status)


async def show(http: Any, name: str = "s") -> Any:
    response = await http.get(f"/v1/sessions/{name}", params={"include_tokens": "true"})
    assert response.status_code == 200, response.text
    return response.json()


async def text_of(http: Any, name: str = "s") -> str:
    return bytes((await show(http, name))["token_ids"]).decode()


def answer_of(document: Any) -> str:
    return str(document["choices"][0]["message"]["content"])


async def test_a_turn_is_computed_behind_the_log_and_only_the_new_message_is_rendered(http: Any, server: Any) -> None:
    await create(http)
    first = answer_of(await chat(http, "hi"))
    second = await chat(http, "go on")
    asked = [bytes(request.prompt_token_ids).decode() for request in server.replica.submitted]
    assert asked[0] == "user: hi\nassistant: "
    assert asked[1] == f"user: hi\nassistant: {first}\nuser: go on\nassistant: "
    assert await text_of(http) == asked[1] + answer_of(second)
    assert second["usage"]["prompt_tokens"] == len(asked[1])


async def test_the_engine_is_told_session_and_rising_epochs(http: Any, server: Any) -> None:
    await create(http)
    await chat(http, "a")
    await chat(http, "b")
    await chat(http, "c", name=(await create(http, "t"))["id"])
    requests = server.replica.submitted
    assert [request.session_id for request in requests] == ["s", "s", "t"]
    assert requests[1].epoch == requests[0].epoch + EPOCHS_PER_TURN
    assert (await show(http))["owner"] == "a"


async def test_a_streamed_turn_is_in_the_log_before_its_end_is_sent(http: Any) -> None:
    await create(http)
    body = {**BASE, "session_id": "s", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    seen: list[int] = []
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if '"finish_reason":"length"' in line:
                seen.append((await show(http))["num_turns"])
    assert seen == [1]


async def test_a_turn_that_cannot_be_stored_does_not_end_as_if_it_were(
    http: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(http)
    store = server.sessions._store
    write = store.write
    server.paused = True
    running = asyncio.create_task(chat(http, "hi", status=503))
    await server.cluster.settle(lambda: bool(server.replica.running))

    def fail_once(_changes: Any) -> None:
        # Only the commit: that the turn is given up afterwards must be stored.
        monkeypatch.setattr(store, "write", write)
        raise Unavailable("no space left")

    monkeypatch.setattr(store, "write", fail_once)
    server.paused = False
    assert (await running)["error"]["code"] == "unavailable"
    assert await text_of(http) == ""
    await chat(http, "hi", on_conflict="wait")
    assert (await text_of(http)).startswith("user: hi\n")


async def test_case_20_a_turn_whose_client_left_leaves_the_history_whole(http: Any, server: Any) -> None:
    await create(http)
    first = answer_of(await chat(http, "one"))
    committed = await text_of(http)
    body = {**BASE, "max_tokens": 50, "session_id": "s", "messages": [{"role": "user", "content": "two"}]}
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if '"content":"' in line and '"content":""' not in line:
                break
    await server.cluster.settle(lambda: not server.replica.running and server.turns.num_open == 0)
    assert await text_of(http) == committed
    third = await chat(http, "three", on_conflict="wait")
    asked = bytes(server.replica.submitted[-1].prompt_token_ids).decode()
    assert asked == f"user: one\nassistant: {first}\nuser: three\nassistant: "
    assert await text_of(http) == asked + answer_of(third)


async def test_a_turn_that_fails_is_given_up_at_once(http: Any, server: Any) -> None:
    await create(http)
    server.replica.error = {"error": "OverQuota", "error_message": "no room", "retry_after_s": 2.0}
    await chat(http, "one", status=429)
    server.replica.error = None
    await chat(http, "x" * 300, status=400)
    await chat(http, "two", on_conflict="wait")
    assert (await text_of(http)).startswith("user: two\n")


async def test_a_second_writer_gets_409_or_waits_its_turn(http: Any, server: Any) -> None:
    await create(http)
    server.paused = True
    first = asyncio.create_task(chat(http, "one"))
    await server.cluster.settle(lambda: bool(server.replica.running))
    error = (await chat(http, "two", status=409))["error"]
    assert (error["code"], error["param"]) == ("conflict", "session_id")
    await post(http, "/v1/sessions/s/truncate", {"num_turns": 0}, status=409)
    third = asyncio.create_task(chat(http, "three", on_conflict="wait"))
    await asyncio.sleep(0.05)
    server.paused = False
    assert await text_of(http) in ("", f"user: one\nassistant: {answer_of(await first)}")
    await third
    turns = (await show(http))["turns"]
    assert [turn["messages"][0]["content"] for turn in turns] == ["one", "three"]


async def test_a_waiting_client_that_leaves_does_not_take_the_session(http: Any, server: Any) -> None:
    await create(http)
    server.paused = True
    first = asyncio.create_task(chat(http, "one"))
    await server.cluster.settle(lambda: bool(server.replica.running))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await chat(http, "two", on_conflict="wait")
    await asyncio.sleep(0.05)
    server.paused = False
    await first
    await chat(http, "three")
    assert [turn["messages"][0]["content"] for turn in (await show(http))["turns"]] == ["one", "three"]


async def test_a_turn_goes_on_when_its_replica_is_lost(http: Any, server: Any, make_replica: Any) -> None:
    await create(http)
    server.paused = True
    running = asyncio.create_task(chat(http, "one"))
    await server.cluster.settle(lambda: bool(server.replica.running))
    await server.replica.step(2)
    second = make_replica("b")
    server.replica.kill()
    await server.cluster.add(second)
    server.cluster.remove(server.replica)
    await server.cluster.settle(lambda: bool(second.running))
    server.replica = second
    server.paused = False
    await running
    await chat(http, "two")
    document = await show(http)
    assert [turn["end"] - turn["prompt_end"] for turn in document["turns"]] == [4, 4]
    assert second.submitted[1].epoch > second.submitted[0].epoch


def test_every_attempt_of_a_turn_has_an_epoch_below_the_next_turn() -> None:
    assert MAX_LOST_ATTEMPTS + 1 < EPOCHS_PER_TURN


async def test_completions_go_on_from_the_log_of_a_session(http: Any, server: Any) -> None:
    await create(http)
    body = {**BASE, "session_id": "s"}
    first = await post(http, "/v1/completions", {**body, "prompt": "abc"})
    second = await post(http, "/v1/completions", {**body, "prompt": [100, 101]})
    third = await post(http, "/v1/completions", {**body, "prompt": ""})
    texts = [each["choices"][0]["text"] for each in (first, second, third)]
    assert await text_of(http) == f"abc{texts[0]}de{texts[1]}{texts[2]}"
    assert len(server.replica.submitted) == 3


async def test_forks_diverge_and_truncated_sessions_go_on(http: Any) -> None:
    await create(http)
    await chat(http, "one")
    await chat(http, "two")
    before = await text_of(http)
    cut = (await show(http))["turns"][0]["end"]
    fork = await post(http, "/v1/sessions/s/fork", {"num_tokens": cut})
    assert (fork["parent"], fork["num_tokens"], fork["num_turns"]) == ("s", cut, 1)
    assert fork["owner"] == "a"
    await chat(http, "other", name=fork["id"])
    assert await text_of(http) == before
    assert (await text_of(http, fork["id"])).startswith(before[:cut] + "\nuser: other\n")
    assert (await post(http, "/v1/sessions/s/truncate", {"num_turns": 1}))["num_tokens"] == cut
    await chat(http, "other")
    assert await text_of(http) == await text_of(http, fork["id"])


async def test_case_09_an_empty_session_forks_empty_and_a_missing_one_leaves_others_alone(http: Any) -> None:
    await create(http)
    fork = await post(http, "/v1/sessions/s/fork", {"id": "f"})
    assert (fork["num_tokens"], fork["num_turns"]) == (0, 0)
    await chat(http, "hi", name="f")
    before = await text_of(http, "f")
    await post(http, "/v1/sessions/missing/fork", {"id": "f"}, status=404)
    await post(http, "/v1/sessions/s/fork", {"id": "f"}, status=409)
    assert await text_of(http, "f") == before


async def test_a_cut_inside_a_prompt_is_continued_as_text_only(http: Any) -> None:
    await create(http)
    await chat(http, "one")
    await post(http, "/v1/sessions/s/truncate", {"num_tokens": 8})
    assert (await chat(http, "two", status=400))["error"]["param"] == "messages"
    await post(http, "/v1/completions", {**BASE, "session_id": "s", "prompt": "!"})
    assert (await text_of(http)).startswith("user: on!")


async def test_sessions_are_listed_shown_pinned_and_deleted(http: Any) -> None:
    await create(http, "a", ttl_s=60.0, priority=-3)
    await create(http, "b", namespace="batch/team-a")
    made = await post(http, "/v1/sessions", {"model": "other"})
    listed = (await http.get("/v1/sessions", params={"model": "tiny"})).json()
    assert [each["id"] for each in listed["data"]] == ["a", "b"]
    assert [each["namespace"] for each in listed["data"]] == ["chat", "batch/team-a"]
    page = (await http.get("/v1/sessions", params={"limit": 2})).json()
    assert page["has_more"]
    rest = (await http.get("/v1/sessions", params={"after": page["data"][-1]["id"]})).json()
    assert [each["id"] for each in rest["data"]] == [made["id"]]
    assert (await post(http, "/v1/sessions/a/pin"))["pinned"] is True
    assert (await post(http, "/v1/sessions/a/unpin"))["pinned"] is False
    await chat(http, "hi", "a")
    document = await show(http, "a")
    assert document["turns"][0]["messages"] == [{"role": "user", "content": "hi"}]
    assert len(document["turns"][0]["answer"]) == 4
    assert (await http.delete("/v1/sessions/a")).json() == {"id": "a", "object": "session", "deleted": True}
    assert (await http.get("/v1/sessions/a")).status_code == 404


async def test_a_sessions_namespace_and_priority_are_those_of_its_turns(http: Any, server: Any) -> None:
    await create(http, namespace="batch/team-a", priority=5)
    await chat(http, "hi")
    await chat(http, "hi", priority=7)
    assert [request.namespace_id for request in server.replica.submitted] == ["batch/team-a"] * 2
    assert [request.priority for request in server.replica.submitted] == [-5, -7]
    assert server.value("remora_generations_in_flight", model="tiny", namespace="chat") == 0


async def test_a_full_namespace_drops_its_least_recently_used_session(http: Any) -> None:
    for name in ("a", "b", "c", "kept"):
        await create(http, name, namespace="chat" if name == "kept" else "batch/team-a")
    await chat(http, "hi", "a")
    await create(http, "d", namespace="batch/team-a")
    listed = (await http.get("/v1/sessions")).json()
    assert [each["id"] for each in listed["data"]] == ["a", "c", "d", "kept"]


async def test_pinned_sessions_stay_and_where_all_are_pinned_a_new_one_is_refused(http: Any) -> None:
    for name in ("a", "b", "c"):
        await create(http, name, namespace="batch/team-a")
        await post(http, f"/v1/sessions/{name}/pin")
    crowded = {"model": "tiny", "namespace": "batch/team-a", "id": "d"}
    response = await http.post("/v1/sessions", json=crowded)
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) > 0
    await post(http, "/v1/sessions/b/unpin")
    await post(http, "/v1/sessions", crowded)
    listed = (await http.get("/v1/sessions")).json()
    assert [each["id"] for each in listed["data"]] == ["a", "c", "d"]


async def test_a_session_goes_when_nobody_has_used_it_for_its_ttl(http: Any) -> None:
    await create(http, "short", ttl_s=0.1)
    await create(http, "long", ttl_s=60.0)
    async with asyncio.timeout(10):
        while (await http.get("/v1/sessions/short")).status_code != 404:
            await asyncio.sleep(0.05)
    listed = (await http.get("/v1/sessions")).json()
    assert [each["id"] for each in listed["data"]] == ["long"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/sessions", {"model": "none"}, 404, "model"),
        ("/v1/sessions", {"model": "tiny", "namespace": "none"}, 404, "namespace"),
        ("/v1/sessions", {"model": "tiny", "id": "a b"}, 400, "id"),
        ("/v1/sessions", {"model": "tiny", "id": "s"}, 409, "id"),
        ("/v1/sessions", {"model": "tiny", "ttl_s": 0}, 400, "ttl_s"),
        ("/v1/sessions", {"model": "tiny", "what": 1}, 400, "what"),
        ("/v1/sessions/none/fork", {}, 404, "session_id"),
        ("/v1/sessions/s/fork", {"num_tokens": 1}, 400, "num_tokens"),
        ("/v1/sessions/s/truncate", {}, 400, "num_tokens"),
        ("/v1/sessions/s/truncate", {"num_turns": 1}, 400, "num_turns"),
        ("/v1/completions", {**BASE, "prompt": "a", "session_id": "none"}, 404, "session_id"),
        ("/v1/completions", {**BASE, "prompt": "a", "session_id": "s", "model": "other"}, 400, "model"),
        ("/v1/completions", {**BASE, "prompt": "a", "session_id": "s", "namespace": "batch/team-a"}, 400, "namespace"),
        ("/v1/completions", {**BASE, "prompt": "a", "session_id": "s", "n": 2}, 400, "n"),
        ("/v1/completions", {**BASE, "prompt": ["a", "b"], "session_id": "s"}, 400, "prompt"),
        ("/v1/completions", {**BASE, "prompt": "", "session_id": "s"}, 400, "prompt"),
        ("/v1/completions", {**BASE, "prompt": "a", "session_id": "s", "echo": True}, 400, "echo"),
        ("/v1/completions", {**BASE, "prompt": "a", "on_conflict": "wait"}, 400, "on_conflict"),
    ],
)
async def test_refusals_name_the_field(http: Any, path: str, body: dict[str, Any], status: int, param: str) -> None:
    await create(http)
    error = (await post(http, path, body, status=status))["error"]
    assert error["param"] == param, error
    assert json.dumps(await show(http)).count('"turns": []') == 1


async def test_bad_query_parameters_are_named(http: Any) -> None:
    for path, param in (("/v1/sessions?limit=0", "limit"), ("/v1/sessions?what=1", "what")):
        response = await http.get(path)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
