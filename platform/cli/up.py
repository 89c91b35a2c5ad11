"""`remora up`: the platform in the foreground."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from remora.cache_actors.process_watch import process_identity
from remora.platform.base.config import RemoraConfig, load_config, parse_config
from remora.platform.base.serve_environment import is_loopback
from remora.platform.cli.instance import InstanceStore, clear_all, clear_remains, state_dir_of
from remora.platform.cli.local_platform import LocalPlatform
from remora.platform.cli.progress import Progress
from remora.platform.cli.start_checks import check_database, check_memory, check_sizes, choose_port, plan_models
from remora.platform.cli.supervisor import STOP_SIGNALS, run_supervised

DEFAULT_CONFIG = Path(__file__).with_name("default.yaml")


class _StopRequested(BaseException):
    """A signal came while the platform was starting."""


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP: the first one interrupts a start or ends the wait, further ones change nothing."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._interrupt = False

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within this block the first signal raises `_StopRequested` in the main thread."""
        self._interrupt = True
        try:
            if self.requested.is_set():
                raise _StopRequested
            yield
        finally:
            self._interrupt = False

    def install(self) -> None:
        """Ray installs its own handler of SIGTERM when it is started: call this again afterwards."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        first = not self.requested.is_set()
        self.requested.set()
        if first and self._interrupt:
            raise _StopRequested


@click.command()
@click.argument("config_file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--port", type=click.IntRange(0, 65535), help="HTTP port instead of the configured one; 0: any free one.")
@click.option("--name", help="Name of the instance instead of the configured cluster.name.")
def up(config_file: Path | None, port: int | None, name: str | None) -> None:
    """Starts everything and serves until Ctrl-C.

    CONFIG_FILE is a YAML file; without one, two versions of SmolLM2-135M share one arena.
    """
    progress = Progress()
    config = _with(load_config(config_file or DEFAULT_CONFIG), "cluster", name=name)
    state_dir = state_dir_of(config)
    store = InstanceStore(state_dir, config.cluster.name)
    with store.locked():
        config = _with(config, "http", port=choose_port(config.http, port))
        check_database(config)
        clear_remains(store, state_dir, progress.say)
        plans = plan_models(config, progress.say)
        check_sizes(config, plans)
        check_memory(config, plans)
        platform = LocalPlatform(config, store, process_identity(), progress.say)

        def clear_up() -> None:
            clear_all(store, state_dir)
            progress.say("stopped")

        code = run_supervised(lambda: _run(platform, config, progress), clear_up)
    sys.exit(code)


def _run(platform: LocalPlatform, config: RemoraConfig, progress: Progress) -> int:
    signals = StopSignals()
    signals.install()
    try:
        with signals.interrupting():
            platform.start(on_ray_started=signals.install)
        progress.say(f"ready: {platform.url}")
        progress.say(access_text(config))
        click.echo(_invitation(config, platform.url))
        if not platform.watch(signals.requested):
            # Nobody would answer an orderly end: the supervisor ends what is left.
            click.echo("remora: Ray ended by itself; stopping everything", err=True)
            return 1
    except (_StopRequested, SystemExit):  # Ray answers SIGTERM by SystemExit until our handlers are back
        pass
    except BaseException:
        _stop(platform, signals, progress)
        if not signals.requested.is_set():  # what fails after a signal fails because of it
            raise
        return 0
    _stop(platform, signals, progress)
    return 0


def _stop(platform: LocalPlatform, signals: StopSignals, progress: Progress) -> None:
    signals.install()
    progress.say("stopping")
    platform.stop()


def _with(config: RemoraConfig, section: str, **values: str | int | None) -> RemoraConfig:
    """The configuration with values of the command line, which pass the same checks."""
    data = config.model_dump(exclude_unset=True)
    data.setdefault(section, {}).update({key: value for key, value in values.items() if value is not None})
    return parse_config(data)


def access_text(config: RemoraConfig) -> str:
    """Who can reach the platform, and with what."""
    if config.tenants:
        names = ", ".join(tenant.name for tenant in config.tenants)
        where = "from this machine" if is_loopback(config.http.host) else f"on {config.http.host}"
        return f"access: with an API key, {where}; tenants: {names}"
    if is_loopback(config.http.host):
        return "access: no API keys, so every socket is on loopback: only this machine can connect (docs/tenants.md)"
    return f"access: NO API KEYS on {config.http.host}: whoever reaches it may do everything (http.trusted_network)"


def _invitation(config: RemoraConfig, url: str) -> str:
    model = config.models[0].name
    key = " -H 'Authorization: Bearer KEY'" if config.tenants else ""
    return f"""
Remora serves {", ".join(model.name for model in config.models)} at {url}

  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a remora?"}}], "max_tokens": 48}}'

  remora chat -m {model}      {url}/ui shows memory, requests and sessions      Ctrl-C stops everything
"""
