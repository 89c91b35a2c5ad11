"""Databases for tests of what is durable: SQLite, and a PostgreSQL server of the session's own."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError

from remora.platform.base.ports import free_ports
from remora.platform.base.state_store import default_database_url


class PostgresServer:
    """A server on a free loopback port, with its data in a temporary folder. It refuses to run as root: as `nobody`
    then."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="remora-postgres-"))
        self._owner: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self._folder, nobody.pw_uid, nobody.pw_gid)
            self._owner = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}
        (self._port,) = free_ports(1)
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "--no-sync", "--auth=trust", "--username=remora", "--encoding=UTF8", "--locale=C")
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd=self._folder, timeout=60, **self._owner)

    def start(self) -> None:
        """Returns when it answers."""
        command = [
            str(self._programs / "postgres"), "-D", str(self._folder / "data"), "-p", str(self._port),
            "-h", "127.0.0.1", "-k", str(self._folder), "-F", "-c", "shared_buffers=8MB", "-c", "max_connections=20",
        ]  # fmt: skip
        log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, **self._owner)
        log.close()
        engine = create_engine(self.url("postgres"))
        deadline_s = time.monotonic() + 30
        while True:
            try:
                engine.connect().close()
                break
            except OperationalError:
                if time.monotonic() > deadline_s or self._process.poll() is not None:
                    raise
                time.sleep(0.05)
        engine.dispose()

    def kill(self) -> None:
        """Ends it at once, as a crash would; what clients were told is committed has to be there afterwards."""
        self._end(signal.SIGQUIT)

    def close(self) -> None:
        self._end(signal.SIGQUIT)
        shutil.rmtree(self._folder)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{next(self._numbers)}"
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} STRATEGY FILE_COPY"))
        engine.dispose()
        return self.url(name).replace("+psycopg", "")

    def url(self, database: str) -> str:
        address = URL.create(
            "postgresql+psycopg", username="remora", host="127.0.0.1", port=self._port, database=database
        )
        return address.render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def postgres_server(require: Callable[[str], str]) -> Iterator[PostgresServer]:
    """Skips where PostgreSQL is not installed."""
    server = PostgresServer(Path(require("postgresql")).resolve().parent)
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, of either kind in turn."""
    if request.param == "sqlite":
        return default_database_url(tmp_path / "new", "test")
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_database()
