"""Sessions that are moved over HTTP, and replicas that are drained, on fake replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import click.testing
import pytest
from tests.unit.serving.test_router import step_until_done

from remora.deployments.moves import Moved
from remora.deployments.token_counts import TokenCounts
from remora.platform.base.errors import Conflict
from remora.platform.base.ids import ReplicaId
from remora.platform.cli.client import ServerRefused
from remora.platform.cli.main import remora
from remora.platform.http.running_moves import decode_moves, move_encoded

TURN = {"model": "tiny", "seed": 1, "session_id": "s", "messages": [{"role": "user", "content": "go"}]}


@pytest.fixture
async def other(server: Any, make_replica: Any) -> AsyncIterator[Any]:
    """A second replica, of another pool, that steps by itself as the first does."""
    replica = make_replica("b", pool="pool-b")
    await server.cluster.add(replica)
    stepping = asyncio.create_task(step_until_done(replica))
    yield replica
    stepping.cancel()


async def migrate(http: Any, to: Any, *, status: int = 200) -> Any:
    response = await http.post("/v1/sessions/s/migrate", json={"to": to})
    assert response.status_code == status, response.text
    return response.json()


async def test_a_streaming_turn_moves_and_its_text_is_that_of_an_unmoved_run(
    http: Any, server: Any, other: Any
) -> None:
    await http.post("/v1/sessions", json={"id": "s", "model": "tiny"})
    body = {**TURN, "max_tokens": 120, "stream": True}
    parts, moved = [], None
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    parts.append(choice["delta"].get("content") or "")
            if moved is None and len(parts) > 10:
                source = server.replica if server.replica.running else other
                target = other if source is server.replica else server.replica
                moved = await migrate(http, {"replica": target.replica_id})
    assert moved is not None
    assert (moved["from"], moved["to"], moved["running"]) == (source.replica_id, target.replica_id, True)
    assert moved["tokens"]["recomputed"] > len(TURN["messages"]) + 10
    assert moved["pause_s"] > 0
    await http.delete("/v1/sessions/s")
    await http.post("/v1/sessions", json={"id": "s", "model": "tiny"})
    unmoved = await http.post("/v1/chat/completions", json={**TURN, "max_tokens": 120})
    assert "".join(parts) == unmoved.json()["choices"][0]["message"]["content"]
    assert "remora_migration_pause_seconds_count" in (await http.get("/metrics")).text


async def test_an_idle_session_goes_on_where_it_was_moved(http: Any, server: Any, other: Any) -> None:
    await http.post("/v1/sessions", json={"id": "s", "model": "tiny"})
    await http.post("/v1/chat/completions", json={**TURN, "max_tokens": 4})
    for pool, replica in (("pool-b", other), ("pool-a", server.replica), ("pool-b", other)):
        before = len(replica.submitted)
        moved = await migrate(http, {"pool": pool})
        assert (moved["to"], moved["running"]) == (replica.replica_id, False)
        assert (await http.get("/v1/sessions/s")).json()["owner"] == replica.replica_id
        await http.post("/v1/chat/completions", json={**TURN, "max_tokens": 4})
        assert len(replica.submitted) > before
    assert (await migrate(http, {"node": "node-1"}))["object"] == "session.move"


@pytest.mark.parametrize(
    "to", [{"replica": "nowhere"}, {"pool": "none"}, {"node": "none"}, {}, {"replica": "a", "pool": "p"}, "a"]
)
async def test_destinations_that_make_no_sense_are_refused_by_name(http: Any, to: Any) -> None:
    await http.post("/v1/sessions", json={"id": "s", "model": "tiny"})
    error = (await migrate(http, to, status=400))["error"]
    assert error["param"].startswith("to")


async def test_a_session_that_does_not_exist_cannot_be_moved(http: Any) -> None:
    await migrate(http, {"replica": "a"}, status=404)


async def test_a_replica_is_drained_and_takes_requests_again(http: Any, server: Any) -> None:
    for path, draining in (("drain", True), ("resume", False)):
        response = await http.post(f"/v1/replicas/a/{path}", json={})
        assert response.json() == {"id": "a", "object": "replica", "draining": draining}
        assert server.replica.draining is draining
    assert (await http.post("/v1/replicas/none/drain", json={})).status_code == 404


async def run(server: Any, *arguments: str) -> str:
    runner = click.testing.CliRunner()
    result = await asyncio.to_thread(runner.invoke, remora, [*arguments, "--url", server.url], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


async def test_the_command_line_moves_sessions_and_drains_nodes(http: Any, server: Any, other: Any) -> None:
    await http.post("/v1/sessions", json={"id": "s", "model": "tiny"})
    await http.post("/v1/chat/completions", json={**TURN, "max_tokens": 4})
    said = await run(server, "sessions", "move", "s", "--replica", "b")
    assert "→ b (" in said
    assert await run(server, "drain", "node-1") == "2 replicas take nothing new; 0 requests are left there\n"
    assert server.replica.draining
    assert other.draining
    await run(server, "drain", "a", "--undo")
    assert not server.replica.draining
    with pytest.raises(ServerRefused, match="to: no replica"):
        await run(server, "sessions", "move", "s", "--pool", "none")


async def test_what_another_router_says_of_a_move_arrives_as_it_was_said(cluster: Any) -> None:
    nothing = await move_encoded(cluster.core, "s", "b")
    assert decode_moves([nothing, nothing]) is None

    class Core:
        class moves:
            outcome: Any = None

            @classmethod
            async def move(cls, _stream: Any, _target: ReplicaId) -> Moved:
                if isinstance(cls.outcome, Exception):
                    raise cls.outcome
                return cls.outcome  # type: ignore[no-any-return]

        def stream_of(self, _session_id: str) -> object:
            return object()

    tokens = TokenCounts(shared=3, copied=2)
    moved = Moved(source=None, replica=ReplicaId("b"), tokens=tokens, ranges=tokens.ranges(), pause_s=0.1, took_s=0.2)
    Core.moves.outcome = moved
    assert decode_moves([nothing, await move_encoded(Core(), "s", "b")]) == moved  # type: ignore[arg-type]
    Core.moves.outcome = Conflict("not now", field="to")
    refusal = await move_encoded(Core(), "s", "b")  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="not now") as caught:
        decode_moves([nothing, refusal])
    assert caught.value.field == "to"
