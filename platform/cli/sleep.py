"""`remora sleep` and `remora wake`: stops a model's replicas until somebody asks for it, and starts them by hand."""

from __future__ import annotations

from urllib.parse import quote

import click

from remora.platform.cli.client import make_client, send_json, url_option


@click.command()
@click.argument("model")
@url_option
def sleep(model: str, url: str | None) -> None:
    """Stops the replicas of a MODEL that has nothing to do, before its idle_timeout_s does; its KV stays."""
    with make_client(url) as client:
        send_json(client, "POST", f"/v1/models/{quote(model)}/sleep", {})
    click.echo(f"{model} sleeps; the next request wakes it")


@click.command()
@click.argument("model")
@url_option
def wake(model: str, url: str | None) -> None:
    """Starts the replicas of a MODEL that sleeps, before somebody asks for it; returns when it is ready."""
    with make_client(url) as client:
        send_json(client, "POST", f"/v1/models/{quote(model)}/wake", {})
    click.echo(f"{model} is ready")
