"""`remora down`: ends an instance of this user, and nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from remora.cache_actors.process_watch import ProcessWatch
from remora.platform.base.paths import default_state_dir
from remora.platform.cli.instance import InstanceRecord, InstanceStore, clear_all
from remora.platform.cli.processes import kill_processes


@click.command()
@click.option("--name", default="default", show_default=True, help="cluster.name of the instance.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="cluster.state_dir of the instance.")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds to wait before killing.")
def down(name: str, state_dir: Path | None, timeout_s: float) -> None:
    """Stops a running platform, and clears what one that was killed has left."""
    state_dir = state_dir or default_state_dir()
    store = InstanceStore(state_dir, name)
    record = store.read()
    if record is None:
        _, removed = clear_all(store, state_dir)
        click.echo(f"No Remora named {name!r} is running." + (f" Removed {len(removed)} files." if removed else ""))
        return
    if _stop(record, timeout_s):
        click.echo(f"Stopped {name!r} ({record.url}).")
        return
    killed, removed = clear_all(store, state_dir)
    click.echo(f"Cleared what {name!r} had left: {len(killed)} processes, {len(removed)} files.")


def _stop(record: InstanceRecord, timeout_s: float) -> bool:
    """Asks the instance's `up` to end. False: it was gone before, or had to be killed, and others have to tidy up."""
    try:
        with ProcessWatch(record.process) as watch:
            os.kill(record.process.pid, signal.SIGTERM)
            if watch.wait(timeout_s):
                return True
    except ProcessLookupError:
        return False
    click.echo(f"process {record.process.pid} did not stop within {timeout_s:.0f} s: killing it", err=True)
    kill_processes([record.process])
    return False
