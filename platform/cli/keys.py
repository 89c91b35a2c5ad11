"""`remora keys`: API keys, which are shown once and configured by their hashes."""

from __future__ import annotations

import sys

import click

from remora.platform.base.tenants import KEY_PREFIX, key_hash, new_key


@click.group()
def keys() -> None:
    """API keys of tenants (docs/tenants.md)."""


@keys.command()
@click.option("--tenant", default="team-a", show_default=True, help="Name in the printed configuration.")
def new(tenant: str) -> None:
    """Makes a key, and prints it and what to put into the configuration. Nothing is stored."""
    key = new_key()
    click.echo(f"key, for the tenant, shown only now:\n  {key}\n\nfor the configuration:")
    click.echo(f"  tenants:\n    - name: {tenant}\n      key_sha256: [{key_hash(key)}]")


@keys.command(name="hash")
def hash_key() -> None:
    """Prints the hash of a key, which is read from the terminal without echo, or from a pipe."""
    key = click.prompt("key", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not key.startswith(KEY_PREFIX):
        raise click.UsageError(f"a key starts with {KEY_PREFIX}: other secrets can be too short for a plain hash")
    click.echo(key_hash(key))
