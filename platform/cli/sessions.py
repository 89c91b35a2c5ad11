"""`remora sessions`: conversations that the platform keeps."""

from __future__ import annotations

import json
import time
from typing import Any

import click
import httpx

from remora.platform.cli.client import get_json, make_client, send_json, url_option
from remora.platform.cli.table import print_table

_PAGE = 1000


@click.group()
def sessions() -> None:
    """Sessions: conversations that the platform keeps."""


@sessions.command(name="list")
@click.option("-m", "--model", help="Only sessions of this model.")
@click.option("-n", "--namespace", help="Only sessions of this namespace.")
@url_option
def list_sessions(model: str | None, namespace: str | None, url: str | None) -> None:
    """Every session, by id."""
    query: dict[str, str | int] = {"limit": _PAGE}
    if model:
        query["model"] = model
    if namespace:
        query["namespace"] = namespace
    found: list[dict[str, Any]] = []
    with make_client(url) as client:
        more = True
        while more:
            page = get_json(client, f"/v1/sessions?{httpx.QueryParams(query)}")
            found += page["data"]
            more = page["has_more"]
            query["after"] = found[-1]["id"] if found else ""
    print_table(
        ["SESSION", "MODEL", "NAMESPACE", "TURNS", "TOKENS", "AGE", "LAST USED", "STATE"],
        [_row(each, time.time()) for each in found],
    )


@sessions.command()
@click.argument("session_id")
@click.option("--json", "as_json", is_flag=True, help="The whole record, with the tokens of the log.")
@url_option
def show(session_id: str, as_json: bool, url: str | None) -> None:
    """The conversation of one session."""
    with make_client(url) as client:
        found = get_json(client, f"/v1/sessions/{session_id}?include_tokens={str(as_json).lower()}")
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for key in ("id", "model", "namespace", "parent", "num_tokens", "num_turns", "epoch", "owner", "ttl_s", "pinned"):
        click.echo(f"{key:<11} {'–' if found[key] is None else found[key]}")
    for turn in found["turns"]:
        click.echo("")
        for message in turn["messages"]:
            click.echo(f"{message.get('role', '?')}: {_text(message.get('content'))}")
        click.echo(f"assistant: {turn['answer']}")


@sessions.command()
@click.argument("session_id")
@click.option("--id", "new_id", help="Name of the new session.")
@click.option("--num-tokens", type=click.IntRange(min=0), help="How much of the log it has; default: all.")
@click.option("--model", help="Another model for it; default: the other session's.")
@url_option
def fork(session_id: str, new_id: str | None, num_tokens: int | None, model: str | None, url: str | None) -> None:
    """A new session that starts with another's log; prints its id."""
    body: dict[str, Any] = {"id": new_id, "num_tokens": num_tokens, **({"model": model} if model else {})}
    with make_client(url) as client:
        made = send_json(client, "POST", f"/v1/sessions/{session_id}/fork", body)
    click.echo(made["id"])


@sessions.command()
@click.argument("session_id")
@click.option("--replica", help="Where to: a replica (`remora status` lists them),")
@click.option("--pool", help="or the least loaded replica of a pool,")
@click.option("--node", help="or of a node;")
@click.option("--model", help="or another model, between two turns.")
@url_option
def move(
    session_id: str, replica: str | None, pool: str | None, node: str | None, model: str | None, url: str | None
) -> None:
    """Moves a session to another replica, where what is being generated goes on, or to another model."""
    places = (("replica", replica), ("pool", pool), ("node", node), ("model", model))
    wanted = {name: value for name, value in places if value}
    if len(wanted) != 1:
        raise click.UsageError("give one of --replica, --pool, --node and --model")
    with make_client(url) as client:
        made = send_json(client, "POST", f"/v1/sessions/{session_id}/migrate", {"to": wanted})
    how = ", ".join(f"{count} tokens {name}" for name, count in made["tokens"].items() if count)
    pause = f", pause {made['pause_s'] * 1000:.0f} ms" if made["running"] else ""
    click.echo(f"{session_id}: {made['from'] or 'nowhere'} → {made['to']} ({how or 'no tokens'}{pause})")


@sessions.command()
@click.argument("session_ids", nargs=-1, required=True)
@url_option
def delete(session_ids: tuple[str, ...], url: str | None) -> None:
    """Forgets sessions."""
    with make_client(url) as client:
        for session_id in session_ids:
            send_json(client, "DELETE", f"/v1/sessions/{session_id}")
            click.echo(f"{session_id}: deleted")


def _row(session: dict[str, Any], now_s: float) -> list[object]:
    state = "busy" if session["busy"] else "pinned" if session["pinned"] else "idle"
    return [
        session["id"],
        session["model"],
        session["namespace"],
        session["num_turns"],
        session["num_tokens"],
        _age(now_s - session["created"]),
        f"{_age(now_s - session['last_used'])} ago",
        state,
    ]


def _age(duration_s: float) -> str:
    for unit, size_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if duration_s >= size_s:
            return f"{int(duration_s // size_s)}{unit}"
    return f"{max(0, int(duration_s))}s"


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)
