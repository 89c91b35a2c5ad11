"""Records and values in SQLite."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from remora.platform.base.errors import ConfigError, Unavailable
from remora.platform.base.state_store import (
    AppendRecord,
    PutValue,
    RemoveStream,
    SqlStateStore,
    default_database_url,
)


def open_store(folder: Path) -> SqlStateStore:
    return SqlStateStore(default_database_url(folder, "test"))


def test_records_come_back_in_order_and_streams_go_as_a_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new")
    store.write([AppendRecord("a", no, bytes([no])) for no in (1, 2, 10)] + [AppendRecord("b", 1, b"b")])
    store.write([PutValue("v", b"1"), PutValue("v", b"2")])
    store.close()
    store = open_store(tmp_path / "new")
    assert list(store.records()) == [("a", b"\x01"), ("a", b"\x02"), ("a", b"\x0a"), ("b", b"b")]
    assert store.value("v") == b"2"
    assert store.value("other") is None
    store.write([RemoveStream("a"), AppendRecord("a", 1, b"again")])
    assert list(store.records()) == [("a", b"again"), ("b", b"b")]
    store.close()


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write([AppendRecord("a", 1, b"x")])
    with pytest.raises(Unavailable):
        store.write([AppendRecord("b", 1, b"y"), AppendRecord("a", 1, b"second writer")])
    assert list(store.records()) == [("a", b"x")]
    store.close()


def test_what_was_written_outlives_a_kill(tmp_path: Path) -> None:
    program = f"""
        import sys, time
        from pathlib import Path
        from remora.platform.base.state_store import AppendRecord, SqlStateStore, default_database_url
        store = SqlStateStore(default_database_url(Path({str(tmp_path)!r}), "test"))
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
    store = open_store(tmp_path)
    assert len(list(store.records())) in (last, last + 1)
    store.close()


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write([PutValue("v", b"1")])
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    store.close()


def test_an_unusable_store_says_which(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"file/state-test\.sqlite"):
        open_store(tmp_path / "file")
    with pytest.raises(ConfigError, match="database_url"):
        SqlStateStore("nonsense")
