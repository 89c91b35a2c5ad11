"""Sessions that go on with another model: the log it gets, how its KV got there, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import click.testing
import pytest
from tests.unit.serving.conftest import byte_tokenizer
from tests.unit.serving.test_router import step_until_done
from tokenizers import AddedToken

from remora.deployments.models.chat_continuation import join_continuation, render_continuation
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.namespaces.session_turn import Turn
from remora.platform.base.errors import InvalidRequest
from remora.platform.cli.main import remora
from remora.platform.http.session_models import retokenised

TURN = {"seed": 1, "session_id": "s", "max_tokens": 5, "messages": [{"role": "user", "content": "go"}]}


@pytest.fixture
async def other(server: Any, make_replica: Any, http: Any) -> AsyncIterator[Any]:
    """A replica of another model, in another pool, and a session of one turn with the first model."""
    replica = make_replica("b", model="other", pool="pool-b")
    await server.cluster.add(replica)
    stepping = asyncio.create_task(step_until_done(replica))
    await http.post("/v1/sessions", json={"id": "s", "model": "tiny"})
    await http.post("/v1/chat/completions", json={**TURN, "model": "tiny"})
    yield replica
    stepping.cancel()


async def tokens_of(http: Any, session: str) -> list[int]:
    return list((await http.get(f"/v1/sessions/{session}", params={"include_tokens": True})).json()["token_ids"])


async def test_a_session_moves_to_another_model_and_goes_on_there(http: Any, server: Any, other: Any) -> None:
    before = await tokens_of(http, "s")
    other.num_cached_tokens = other.num_copied_tokens = 8
    response = await http.post("/v1/sessions/s/migrate", json={"to": {"model": "other"}})
    assert response.status_code == 200, response.text
    moved = response.json()
    assert (moved["from"], moved["to"], moved["running"]) == ("a", "b", False)
    assert moved["tokens"] == {"shared": 0, "copied": 8, "converted": 0, "recomputed": len(before) - 8}
    (brought,) = other.submitted
    assert (list(brought.prompt_token_ids), brought.namespace_id) == (before, "other")
    assert brought.kv_source.pool_id == "pool-a"
    session = (await http.get("/v1/sessions/s")).json()
    assert (session["model"], session["namespace"], session["owner"], session["num_turns"]) == (
        "other",
        "other",
        "b",
        1,
    )
    assert await tokens_of(http, "s") == before
    assert (await http.post("/v1/chat/completions", json={**TURN, "model": "tiny"})).status_code == 400
    answer = await http.post("/v1/chat/completions", json={**TURN, "model": "other"})
    assert answer.status_code == 200, answer.text
    assert other.submitted[-1].prompt_token_ids[: len(before)] == tuple(before)


async def test_a_fork_with_another_model_leaves_its_parent_alone(http: Any, server: Any, other: Any) -> None:
    before = await tokens_of(http, "s")
    body = {"id": "t", "model": "other", "num_tokens": 9}
    response = await http.post("/v1/sessions/s/fork", json=body)
    assert response.status_code == 200, response.text
    made = response.json()
    assert (made["id"], made["model"], made["parent"], made["owner"], made["num_tokens"]) == ("t", "other", "s", "b", 9)
    assert sum(made["transfer"]["tokens"].values()) == 9
    assert await tokens_of(http, "t") == before[:9]
    parent = (await http.get("/v1/sessions/s")).json()
    assert (parent["model"], parent["num_tokens"]) == ("tiny", len(before))


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("migrate", {"to": {"model": "none"}}, 404, "model"),
        ("migrate", {"to": {"model": "other", "namespace": "chat"}}, 404, "namespace"),
        ("migrate", {"to": {"model": "tiny"}}, 400, "to"),
        ("migrate", {"to": {"model": "other", "pool": "pool-b"}}, 400, "to"),
        ("migrate", {"to": {"pool": "pool-a", "namespace": "chat"}}, 400, "to"),
        ("fork", {"model": "none"}, 404, "model"),
        ("fork", {"model": ""}, 400, "model"),
        ("fork", {"namespace": "other"}, 400, "namespace"),
        ("fork", {"model": "other", "num_tokens": 10_000}, 400, "num_tokens"),
    ],
)
async def test_models_that_make_no_sense_are_refused_by_name(
    http: Any, other: Any, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    before = (await http.get("/v1/sessions/s")).json()
    response = await http.post(f"/v1/sessions/s/{path}", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    after = (await http.get("/v1/sessions/s")).json()
    assert (after["version"], after["model"]) == (before["version"], before["model"])


async def test_a_session_stays_with_its_model_while_a_turn_runs_or_when_its_log_does_not_fit(
    http: Any, server: Any, other: Any
) -> None:
    server.paused = True
    body = {**TURN, "model": "tiny", "max_tokens": 30}
    turn = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    await server.cluster.settle(lambda: bool(server.replica.running))
    num_tokens = len(await tokens_of(http, "s"))
    refused = await http.post("/v1/sessions/s/migrate", json={"to": {"model": "other"}})
    assert (refused.status_code, "fork the session to 'other' now" in refused.text) == (409, True)
    forked = await http.post("/v1/sessions/s/fork", json={"id": "now", "model": "other"})
    assert (forked.status_code, len(await tokens_of(http, "now"))) == (200, num_tokens)
    server.paused = False
    assert (await turn).status_code == 200
    until_full = {key: value for key, value in body.items() if key != "max_tokens"}
    assert (await http.post("/v1/chat/completions", json=until_full)).status_code == 200
    assert len(await tokens_of(http, "s")) == 200
    response = await http.post("/v1/sessions/s/migrate", json={"to": {"model": "other"}})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await http.get("/v1/sessions/s")).json()["model"] == "tiny"


@pytest.mark.parametrize(("path", "body"), [("migrate", {"to": {"model": "other"}}), ("fork", {"model": "other"})])
async def test_a_model_whose_replicas_take_nothing_now_is_to_be_asked_again(
    http: Any, server: Any, other: Any, path: str, body: dict[str, Any]
) -> None:
    server.cluster.publish(draining=("b",))
    response = await http.post(f"/v1/sessions/s/{path}", json=body)
    assert (response.status_code, "retry-after" in response.headers) == (503, True), response.text
    assert (await http.get("/v1/sessions/s")).json()["model"] == "tiny"


async def test_the_command_line_moves_and_forks_to_models(http: Any, server: Any, other: Any) -> None:
    async def run(*arguments: str) -> str:
        runner = click.testing.CliRunner()
        told = [*arguments, "--url", server.url]
        result = await asyncio.to_thread(runner.invoke, remora, told, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert await run("sessions", "fork", "s", "--id", "t", "--model", "other") == "t\n"
    assert "→ b (" in await run("sessions", "move", "s", "--model", "other")


def brackets() -> ChatTokenizer:
    """Another vocabulary, another template: `[role] content` without line breaks, ended by <stop>."""
    tokenizer = byte_tokenizer()._tokenizer
    tokenizer.add_special_tokens([AddedToken("<stop>", special=True)])
    template = (
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}<stop>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return ChatTokenizer(tokenizer, chat_template=template, eos_token_ids=(257,))


def written(tokenizer: ChatTokenizer, *exchanges: tuple[str, str]) -> tuple[list[int], list[Turn]]:
    """A log as chat requests make it."""
    log: list[int] = []
    turns: list[Turn] = []
    for question, answer in exchanges:
        start = len(log)
        messages = [{"role": "user", "content": question}]
        if log:
            text = render_continuation(tokenizer, messages, add_generation_prompt=True)
        else:
            text = tokenizer.render(messages)
        log += join_continuation(tokenizer, log, tokenizer.encode(text, add_special_tokens=False))
        prompt_end = len(log)
        log += tokenizer.encode(answer, add_special_tokens=False)
        sent = b'[{"role":"user","content":"%s"}]' % question.encode()
        turns.append(Turn(kind="chat", start=start, prompt_end=prompt_end, end=len(log), messages_json=sent))
    return log, turns


async def test_chats_are_rendered_anew_by_the_template_of_a_model_with_another_tokenizer() -> None:
    source, target = byte_tokenizer(), brackets()
    assert source.tokenizer_id != target.tokenizer_id
    exchanges = (("What is a remora?", "A fish."), ("Really?", "Yes, é."))
    log, turns = written(source, *exchanges)
    expected, expected_turns = written(target, *exchanges)
    found, found_turns = await retokenised(source, target, log, turns)
    assert list(found) == expected
    assert [(t.start, t.prompt_end, t.end) for t in found_turns] == [
        (t.start, t.prompt_end, t.end) for t in expected_turns
    ]


async def test_messages_that_the_other_template_refuses_are_not_lost() -> None:
    source = byte_tokenizer()
    target = ChatTokenizer(
        byte_tokenizer()._tokenizer,
        chat_template="{% for message in messages %}{% if 'remora' in message.content %}"
        "{{ raise_exception('no fish') }}{% endif %}{{ message.content }}{% endfor %}",
        eos_token_ids=(256,),
    )
    log, turns = written(source, ("Hello?", "Yes."), ("What is a remora?", "A fish."))
    with pytest.raises(InvalidRequest, match="no fish") as refused:
        await retokenised(source, target, log, turns)
    assert refused.value.field == "model"


async def test_text_and_what_was_cut_are_taken_as_they_stand() -> None:
    source, target = byte_tokenizer(), brackets()
    log, turns = written(source, ("What is a remora?", "A fish."))
    text = source.encode("Once upon", add_special_tokens=False)
    turns.append(Turn(kind="text", start=len(log), prompt_end=len(log) + 4, end=len(log) + len(text)))
    cut = [*log[6:], *text]
    moved = [
        Turn(
            kind=turn.kind, start=max(0, turn.start - 6), prompt_end=turn.prompt_end - 6, end=turn.end - 6,
            messages_json=turn.messages_json,
        )
        for turn in turns
    ]  # fmt: skip
    found, found_turns = await retokenised(source, target, cut, moved)
    assert target.decode(found) == source.decode(cut)
    assert found_turns[-1].end == len(found)
    assert found_turns[1].start == found_turns[0].end
