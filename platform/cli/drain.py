"""`remora drain`: empties replicas before they go away."""

from __future__ import annotations

import time
from typing import Any

import click
import httpx

from remora.platform.base.errors import NotFound
from remora.platform.cli.client import get_json, make_client, send_json, url_option

_POLL_S = 0.2


@click.command()
@click.argument("name")
@click.option("--undo", is_flag=True, help="Let the replicas take requests again.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until nothing runs there any more.",
)
@url_option
def drain(name: str, undo: bool, wait_s: float, url: str | None) -> None:
    """Empties a replica, or all replicas of a node: they take nothing new, and what they run goes on elsewhere.

    A request without another replica of its model ends where it is.
    """
    with make_client(url) as client:
        found = [each for each in _replicas(client) if name in (each["id"], each["node"])]
        if not found:
            raise NotFound(f"There is no replica or node {name!r}; `remora status` lists them.")
        for replica in found:
            send_json(client, "POST", f"/v1/replicas/{replica['id']}/{'resume' if undo else 'drain'}", {})
        if undo:
            click.echo(f"{len(found)} replicas take requests again")
            return
        names = {replica["id"] for replica in found}
        deadline_s = time.monotonic() + wait_s
        while (left := _num_unfinished(client, names)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        click.echo(f"{len(found)} replicas take nothing new; {left} requests are left there")


def _replicas(client: httpx.Client) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = get_json(client, "/v1/replicas")["data"]
    return replicas


def _num_unfinished(client: httpx.Client, names: set[str]) -> int:
    stats = [each["stats"] or {} for each in _replicas(client) if each["id"] in names]
    return sum(each.get("num_running", 0) + each.get("num_waiting", 0) + each.get("num_parked", 0) for each in stats)
