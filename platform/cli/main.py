"""The command `remora`."""

from __future__ import annotations

import importlib
import logging
import sys

import click

from remora.platform.base.errors import ConfigError, RemoraError

#: Exit codes: 1 something failed, 2 the command line or the configuration is wrong.
EXIT_FAILED = 1
EXIT_USAGE = 2


#: Command → module of platform/cli whose function of the same name it is; imported when it is needed.
_COMMANDS = {
    "up": "up",
    "down": "down",
    "status": "status",
    "chat": "chat",
    "ns": "ns",
    "sessions": "sessions",
    "drain": "drain",
    "sleep": "sleep",
    "wake": "sleep",
    "trace": "trace",
    "keys": "keys",
    "bench": "bench",
    "replay": "replay",
    "accuracy": "accuracy",
    "size": "size",
    "validate": "models",
    "pull": "models",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"remora.platform.cli.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="remora")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens inside.")
def remora(verbose: bool) -> None:
    """Serves many language models from shared, quota-managed KV memory on Ray."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


def main() -> None:
    """Runs the command line; errors of Remora are one sentence on standard error, never a traceback."""
    try:
        remora(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ConfigError as error:
        click.echo(f"remora: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except RemoraError as error:
        click.echo(f"remora: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except BrokenPipeError:
        sys.exit(141)


if __name__ == "__main__":
    main()
