"""One `up` per cluster name; the record tells who may be stopped."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from remora.cache_actors.process_watch import boot_id, process_identity
from remora.namespaces.commands import ProcessIdentity
from remora.platform.base.local_ray import TEMP_DIR_PREFIX
from remora.platform.base.paths import shared_memory_prefix
from remora.platform.cli.instance import (
    AlreadyRunning,
    InstanceRecord,
    InstanceStore,
    clear_all,
    clear_remains,
    remove_remains,
    running_instances,
)
from remora.platform.cli.processes import INSTANCE_VARIABLE


def record(**changes: object) -> InstanceRecord:
    base = InstanceRecord(
        cluster_name="blue",
        instance_id=secrets.token_hex(8),
        process=process_identity(),
        platform=ProcessIdentity(pid=2**22 - 1, start_time_ticks=1, boot_id=boot_id()),
        url="http://127.0.0.1:8000",
    )
    return msgspec.structs.replace(base, **changes)


def test_a_record_is_read_back_and_forgotten(tmp_path: Path) -> None:
    store = InstanceStore(tmp_path, "blue")
    assert store.read() is None
    written = record(ray_temp_dir="/tmp/x", status="ready")
    store.write(written)
    assert store.read() == written
    assert running_instances(tmp_path) == [written]
    store.remove()
    assert store.read() is None
    assert running_instances(tmp_path) == []


def test_an_instance_whose_process_is_gone_is_not_running(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    gone = record(process=process_identity(child.pid))
    assert gone.is_running()
    child.kill()
    child.wait()
    assert not gone.is_running()
    InstanceStore(tmp_path, "blue").write(gone)
    assert running_instances(tmp_path) == []


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    store = InstanceStore(tmp_path, "blue")
    store.write(record())
    path = tmp_path / "instance-blue.json"
    path.write_bytes(path.read_bytes()[:40])
    assert store.read() is None


def test_a_second_up_is_refused_with_the_firsts_address_and_another_name_is_not(tmp_path: Path) -> None:
    store = InstanceStore(tmp_path, "blue")
    with store.locked():
        store.write(record())
        refused = pytest.raises(AlreadyRunning, match=r"'blue' is running already .*http://127\.0\.0\.1:8000")
        with refused, InstanceStore(tmp_path, "blue").locked():
            pass
        with InstanceStore(tmp_path, "green").locked():
            pass
    with InstanceStore(tmp_path, "blue").locked():
        pass


def test_remains_are_removed_by_their_mark(tmp_path: Path) -> None:
    left = record(ray_temp_dir=str(tmp_path / f"{TEMP_DIR_PREFIX}abc"))
    (tmp_path / f"{TEMP_DIR_PREFIX}abc").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, INSTANCE_VARIABLE: left.instance_id},
    )
    assert [identity.pid for identity in remove_remains(left)] == [child.pid]
    assert child.wait(5) == -9
    assert list(tmp_path.iterdir()) == []


def test_clearing_up_forgets_the_record_and_the_process_that_ran_the_platform(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    store = InstanceStore(tmp_path, "blue")
    store.write(record(platform=process_identity(child.pid)))
    killed, removed = clear_all(store, tmp_path)
    assert [identity.pid for identity in killed] == [child.pid]
    assert removed == []
    assert child.wait(5) == -9
    assert store.read() is None


def test_before_a_start_remains_are_told_and_what_could_be_adopted_stays(tmp_path: Path) -> None:
    arena = tmp_path / f"{shared_memory_prefix('blue')}cpu0-node-session.arena"
    arena.write_bytes(b"x")
    store = InstanceStore(tmp_path, "blue")
    store.write(record())
    said: list[str] = []
    clear_remains(store, tmp_path, said.append)
    assert said == [f"found {arena}, left by an earlier instance"]
    assert store.read() is None
    assert arena.exists()
    assert clear_all(store, tmp_path) == ([], [arena])
    assert not arena.exists()


def test_a_folder_that_is_not_remoras_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    remove_remains(record(ray_temp_dir=str(tmp_path / "precious")))
    assert (tmp_path / "precious").exists()
