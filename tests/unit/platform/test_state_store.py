"""Records and values, in SQLite and in PostgreSQL."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from remora.platform.base.config import ClusterConfig
from remora.platform.base.errors import ConfigError, Unavailable
from remora.platform.base.sql_state_store import SqlStateStore, check_database_url
from remora.platform.base.state_store import (
    AppendRecord,
    PutValue,
    RemoveStream,
    database_url_of,
    default_database_url,
)


def open_store(folder: Path) -> SqlStateStore:
    return SqlStateStore(default_database_url(folder, "test"))


def test_records_come_back_in_order_and_streams_go_as_a_whole(database_url: str) -> None:
    store = SqlStateStore(database_url)
    store.write([AppendRecord("a", no, bytes([no])) for no in (1, 2, 10)] + [AppendRecord("b", 1, b"b")])
    store.write([PutValue("v", b"1"), PutValue("v", b"2")])
    store.close()
    store = SqlStateStore(database_url)
    assert list(store.records()) == [("a", b"\x01"), ("a", b"\x02"), ("a", b"\x0a"), ("b", b"b")]
    assert store.value("v") == b"2"
    assert store.value("other") is None
    store.write([RemoveStream("a"), AppendRecord("a", 1, b"again")])
    assert list(store.records()) == [("a", b"again"), ("b", b"b")]
    store.close()


def test_a_batch_is_written_whole_or_not_at_all(database_url: str) -> None:
    store = SqlStateStore(database_url)
    store.write([AppendRecord("a", 1, b"x")])
    with pytest.raises(Unavailable):
        store.write([AppendRecord("b", 1, b"y"), AppendRecord("a", 1, b"second writer")])
    assert list(store.records()) == [("a", b"x")]
    store.close()


def test_what_was_written_outlives_a_kill(database_url: str) -> None:
    program = f"""
        from remora.platform.base.sql_state_store import SqlStateStore
        from remora.platform.base.state_store import AppendRecord
        store = SqlStateStore({database_url!r})
        for no in range(1, 1000000):
            store.write([AppendRecord("a", no, b"x" * 100)])
            print(no, flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    last = 0
    while last < 20:
        last = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read().split("\n")
    child.wait()
    last = max([last, *(int(each) for each in rest[:-1])])
    store = SqlStateStore(database_url)
    assert len(list(store.records())) in (last, last + 1)
    store.close()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_server_that_was_away_is_found_again_with_all_it_had(database_url: str, postgres_server: Any) -> None:
    store = SqlStateStore(database_url)
    store.write([AppendRecord("a", 1, b"x")])
    postgres_server.kill()
    with pytest.raises(Unavailable, match=r"postgresql\+psycopg://remora@127.0.0.1"):
        store.write([AppendRecord("a", 2, b"y")])
    postgres_server.start()
    store.write([AppendRecord("a", 2, b"z")])
    assert list(store.records()) == [("a", b"x"), ("a", b"z")]
    store.close()


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match="needs the Python package psycopg, which the extra `postgres` brings"):
        check_database_url("postgresql://remora:secret@db/remora")


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write([PutValue("v", b"1")])
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    store.close()


def test_an_unusable_store_says_which(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"file/state-test\.sqlite"):
        open_store(tmp_path / "file")
    with pytest.raises(ConfigError, match="database_url") as caught:
        SqlStateStore("nonsense with a password")
    assert "password" not in str(caught.value)


def test_the_database_is_the_configured_one_then_that_of_the_environment_then_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterConfig(name="test", state_dir=tmp_path)
    monkeypatch.delenv("REMORA_DATABASE_URL", raising=False)
    assert database_url_of(cluster) == default_database_url(tmp_path, "test")
    monkeypatch.setenv("REMORA_DATABASE_URL", "postgresql://remora:secret@db/remora")
    assert database_url_of(cluster) == "postgresql://remora:secret@db/remora"
    configured = cluster.model_copy(update={"database_url": "sqlite:////elsewhere.sqlite"})
    assert database_url_of(configured) == "sqlite:////elsewhere.sqlite"


def test_a_postgres_that_is_away_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg", reason="needs the extra postgres")
    with pytest.raises(Unavailable, match=r"postgresql\+psycopg://remora:\*\*\*@127\.0\.0\.1:9/remora") as caught:
        SqlStateStore("postgresql://remora:secret@127.0.0.1:9/remora")
    assert "secret" not in str(caught.value)
