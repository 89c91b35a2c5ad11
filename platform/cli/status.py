"""`remora status`: what runs here and how it is."""

from __future__ import annotations

import sys
from typing import Any

import click
import httpx

from remora.platform.base.paths import default_state_dir
from remora.platform.cli.client import CannotReach, get_json, make_client, url_option
from remora.platform.cli.instance import running_instances
from remora.platform.cli.progress import size_text
from remora.platform.cli.table import print_table


@click.command()
@url_option
def status(url: str | None) -> None:
    """Shows the running instance, its replicas, pools and namespaces. Exit code 1 when nothing runs."""
    instances = running_instances(default_state_dir())
    for instance in instances:
        click.echo(f"{instance.cluster_name}: {instance.status} at {instance.url} (process {instance.process.pid})")
    if not instances and url is None:
        click.echo("Nothing is running. Start with `remora up`.")
        sys.exit(1)
    if url is None and instances[0].status != "ready":
        return
    with make_client(url) as client:
        _show(client)


def _show(client: httpx.Client) -> None:
    models: list[dict[str, Any]] = get_json(client, "/v1/models")["data"]
    print_table(
        ["MODEL", "STATE", "NAMESPACES"],
        [[each["id"], each["state"], ", ".join(each["namespaces"])] for each in models],
    )
    replicas: list[dict[str, Any]] = get_json(client, "/v1/replicas")["data"]
    print_table(
        ["REPLICA", "MODEL", "CONNECTED", "LOAD TOKENS"],
        [[each["id"], each["model"], "yes" if each["connected"] else "no", each["load_tokens"]] for each in replicas],
    )
    pools: list[dict[str, Any]] = get_json(client, "/v1/pools")["data"]
    print_table(
        ["POOL", "ARENA", "USED", "CACHED", "EXTENTS FREE"],
        [
            [
                each["id"],
                size_text(each["data_bytes"]),
                size_text(each["used_bytes"]),
                size_text(each["cached_bytes"]),
                f"{each['num_unleased_extents']}/{each['num_extents']}",
            ]
            for each in pools
        ],
    )
    if not pools:
        raise CannotReach("no pool answers")
