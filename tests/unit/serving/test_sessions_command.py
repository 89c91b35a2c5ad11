"""`remora sessions` against the HTTP API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click.testing
import pytest

from remora.platform.cli.client import ServerRefused
from remora.platform.cli.main import remora

BASE = {"model": "tiny", "max_tokens": 4, "seed": 1}


async def run(server: Any, *arguments: str) -> str:
    """Standard output of the command, which runs in a thread beside the server."""
    runner = click.testing.CliRunner()
    command = ["sessions", *arguments, "--url", server.url]
    result = await asyncio.to_thread(runner.invoke, remora, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


async def test_sessions_are_listed_shown_forked_and_deleted(http: Any, server: Any) -> None:
    for name in ("one", "two"):
        await http.post("/v1/sessions", json={"id": name, "model": "tiny"})
    body = {**BASE, "session_id": "one", "messages": [{"role": "user", "content": "hello"}]}
    answer = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
    listed = (await run(server, "list")).split("\n")
    assert listed[1].split() == ["SESSION", "MODEL", "NAMESPACE", "TURNS", "TOKENS", "AGE", "LAST", "USED", "STATE"]
    assert [line.split()[0] for line in listed[2:] if line] == ["one", "two"]
    assert listed[2].split()[1:5] == ["tiny", "chat", "1", str(len("user: hello\nassistant: ") + 4)]
    shown = await run(server, "show", "one")
    assert f"user: hello\nassistant: {answer}\n" in shown
    assert len(json.loads(await run(server, "show", "one", "--json"))["token_ids"]) == 27
    assert await run(server, "fork", "one", "--id", "three", "--num-tokens", "5") == "three\n"
    assert await run(server, "delete", "one", "two") == "one: deleted\ntwo: deleted\n"
    assert (await run(server, "list", "-m", "tiny")).split("\n")[2].split()[0] == "three"
    with pytest.raises(ServerRefused, match="does not exist"):
        await run(server, "show", "one")
