"""`remora bench`: how fast a server or an engine is."""

from __future__ import annotations

import click

from remora.platform.cli.bench_batch import batch
from remora.platform.cli.bench_http import http
from remora.platform.cli.bench_peers import peers


@click.group()
def bench() -> None:
    """Measures a server over HTTP, an engine alone, or Remora beside its peers."""


bench.add_command(batch)
bench.add_command(http)
bench.add_command(peers)
