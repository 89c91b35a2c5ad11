"""Rolling and edited sessions over HTTP on a fake replica: what the engine is told, what comes back into the log."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.serving.test_sessions import post

from remora.deployments.engine.messages import TokenDelta
from remora.namespaces.edits import ContextOutcome, ContextPlan, EditRecord, Removal

BASE = {"model": "tiny", "max_tokens": 4, "seed": 1}
EDIT = EditRecord(position=2, end=6, digest=b"d", kind="removed")


async def create(http: Any, **more: Any) -> Any:
    return await post(http, "/v1/sessions", {"id": "s", "model": "tiny", **more})


async def say(http: Any, prompt: str, *, status: int = 200, **more: Any) -> Any:
    return await post(http, "/v1/completions", {**BASE, "session_id": "s", "prompt": prompt, **more}, status=status)


async def text_of(http: Any, name: str = "s") -> str:
    document = (await http.get(f"/v1/sessions/{name}", params={"include_tokens": "true"})).json()
    return bytes(document["token_ids"]).decode()


@pytest.fixture
def end_with(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the fake replica end its requests with an outcome."""

    def use(outcome: ContextOutcome | None) -> None:
        plain = type(server.replica)._delta

        def delta(*arguments: Any) -> TokenDelta:
            made = plain(server.replica, *arguments)
            fields = {name: getattr(made, name) for name in made.__struct_fields__}
            return TokenDelta(**{**fields, "context": outcome if made.finish_reason else None})

        monkeypatch.setattr(server.replica, "_delta", delta)

    return use


async def test_a_session_that_rolls_may_say_more_than_its_context_holds(http: Any, server: Any, end_with: Any) -> None:
    made = await create(http, context_overflow="roll", keep_tokens=8)
    assert (made["context_overflow"], made["keep_tokens"], made["cache_limit"]) == ("roll", 8, None)
    end_with(ContextOutcome(edits=(EDIT,), removed=((8, 100),)))
    answer = await say(http, "x" * 300)
    assert answer["usage"]["prompt_tokens"] == 300
    request = server.replica.submitted[-1]
    assert request.context == ContextPlan(limit_tokens=200, keep_tokens=8)
    assert len(request.block_hashes) == 200 // 4
    assert len(await text_of(http)) == 300 + 4 - 92
    end_with(None)
    assert (await say(http, "on", max_tokens=1_000_001, status=400))["error"]["param"] == "max_tokens"
    await say(http, "and on")
    assert server.replica.submitted[-1].context.edits == (EDIT,)
    document = (await http.get("/v1/sessions/s")).json()
    assert document["edits"] == [{"position": 2, "kind": "removed"}]
    assert document["num_turns"] == 2


async def test_without_rolling_a_full_context_is_refused_with_both_numbers(http: Any) -> None:
    await create(http)
    error = (await say(http, "x" * 300, status=400))["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "304" in error["message"]
    assert "200" in error["message"]


async def test_a_cache_limit_is_a_shorter_context(http: Any, server: Any) -> None:
    await create(http, cache_limit=20 * 256 + 255)
    await say(http, "x" * 70)
    assert server.replica.submitted[-1].context.limit_tokens == 80
    error = (await say(http, "x" * 7, status=400))["error"]
    assert error["code"] == "context_length_exceeded"
    await post(http, "/v1/sessions/s/truncate", {"num_tokens": 0})
    await say(http, "x" * 76)


async def test_a_cache_limit_holds_more_tokens_in_a_smaller_precision(http: Any, server: Any) -> None:
    await server.replica.prepare_precision("chat", ("int8", "int8"))
    await server.replica.refresh_namespaces()
    await server.cluster.settle(lambda: server.core.fleet.known_card("tiny").of("chat").block_bytes == 128)
    await create(http, cache_limit=20 * 256 + 255)
    await say(http, "x" * 70)
    assert server.replica.submitted[-1].context.limit_tokens == 164


async def test_a_cache_limit_that_holds_hardly_a_token_is_refused(http: Any) -> None:
    await create(http, cache_limit=300)
    assert "cache_limit of 300 bytes holds 4 tokens" in (await say(http, "hi", status=400))["error"]["message"]


async def test_a_range_removed_from_the_middle_is_removed_from_the_kv_before_the_next_turn(
    http: Any, server: Any, end_with: Any
) -> None:
    await create(http)
    await say(http, "0123456789")
    before = await text_of(http)
    cut = await post(http, "/v1/sessions/s/truncate", {"remove": {"start": 2, "end": 6}})
    assert cut["num_tokens"] == 10
    left = before[:2] + before[6:]
    assert await text_of(http) == left
    end_with(ContextOutcome(edits=(EDIT,), removed=((2, 6),)))
    server.replica.num_cached_tokens = 14
    answer = await say(http, "!")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (11, 11)
    request = server.replica.submitted[-1]
    assert bytes(request.prompt_token_ids).decode() == before + "!"
    assert request.context.removals == (Removal(at=14, start=2, end=6),)
    assert len(request.block_hashes) == 14 // 4
    assert (await text_of(http)).startswith(left + "!")
    fork = await post(http, "/v1/sessions/s/fork", {"num_tokens": 12})
    assert fork["edits"] == [{"position": 2, "kind": "removed"}]
    assert (await post(http, "/v1/sessions/s/fork", {"num_tokens": 2}))["edits"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"remove": {"start": 3, "end": 2}}, "start"),
        ({"remove": {"start": 0, "end": 99}}, "start"),
        ({"remove": {"start": 0, "end": 1}, "num_turns": 1}, "remove"),
        ({}, "num_tokens"),
    ],
)
async def test_a_cut_that_cannot_be_is_refused_by_name(http: Any, body: dict[str, Any], param: str) -> None:
    await create(http)
    await say(http, "0123")
    assert (await post(http, "/v1/sessions/s/truncate", body, status=400))["error"]["param"] == param
    assert len(await text_of(http)) == 8


async def test_a_session_shows_its_blocks_by_pool_its_age_owner_and_epoch(http: Any) -> None:
    await create(http)
    await say(http, "0123456789")
    shown = (await http.get("/v1/sessions/s")).json()
    assert shown["blocks"] == {"full": 3, "block_tokens": 4, "device": {"pool": 3}}
    assert 0 <= shown["age_s"] < 60
    assert shown["owner"] == "a"
    assert shown["epoch"] > 0
