"""`remora validate` and `remora pull`: configurations and model files, without starting anything."""

from __future__ import annotations

from pathlib import Path

import click

from remora.deployments.models.source import resolve_source
from remora.platform.base.config import load_config
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.progress import size_text
from remora.platform.cli.start_checks import check_database, check_memory, check_sizes, plan_models


@click.command()
@click.argument("config_file", type=click.Path(path_type=Path))
@click.option("--no-models", is_flag=True, help="Check the file alone: no model files, nothing of this machine.")
def validate(config_file: Path, no_models: bool) -> None:
    """Checks a configuration file: keys, values, model files, and sizes against this machine.

    Exit code 0: it can be served here. 2: a line on standard error for each thing that is wrong.
    """
    config = load_config(config_file)
    if not no_models:
        check_database(config)
        plans = plan_models(config, click.echo)
        check_sizes(config, plans)
        check_memory(config, plans)
    click.echo(
        f"{config_file}: valid; {len(config.models)} models, {len(config.devices)} devices with "
        f"{size_text(sum(device.arena_bytes for device in config.devices))} of arenas"
    )


@click.command()
@click.argument("source")
@click.option("--revision", help="Branch, tag or commit on the model hub.")
def pull(source: str, revision: str | None) -> None:
    """Fetches a model from the hub, or finds a local one, and prints where it lies.

    SOURCE is what a configuration's models.source takes: a hub id, a folder, a .gguf file, package:PACKAGE/FILE.
    """
    files = resolve_source(ModelConfig(name="pulled", source=source, revision=revision))
    click.echo(str(files.path))
