"""The record of a running instance: who may be stopped by `remora down`, and what the next `remora up` finds.

state_dir/instance-<cluster>.json   the record; written before anything is started
state_dir/instance-<cluster>.lock   held by `up` as long as it lives; the kernel lets go when the process ends
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from remora.cache_actors.process_watch import is_alive
from remora.cache_actors.stale_files import remove_stale, stale_files
from remora.namespaces.commands import ProcessIdentity
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import RemoraError
from remora.platform.base.local_ray import TEMP_DIR_PREFIX
from remora.platform.base.paths import SHARED_MEMORY_DIR, default_state_dir
from remora.platform.cli.processes import INSTANCE_VARIABLE, kill_marked, kill_processes


class AlreadyRunning(RemoraError):
    """Another `remora up` with the same cluster name lives."""

    code = "already_running"


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to find and end an instance."""

    cluster_name: str
    #: Value of INSTANCE_VARIABLE in the environment of each of its processes.
    instance_id: str
    #: The supervisor: `remora down` signals it.
    process: ProcessIdentity
    #: The process that runs the platform, its child.
    platform: ProcessIdentity
    url: str
    #: Folder of its own Ray; empty when it joined a running cluster.
    ray_temp_dir: str = ""
    status: Literal["starting", "ready", "stopping"] = "starting"

    def is_running(self) -> bool:
        """Whether its `up` lives."""
        return is_alive(self.process)


class InstanceStore:
    """Reads and writes the record of one cluster name."""

    def __init__(self, state_dir: Path, cluster_name: str) -> None:
        self.cluster_name = cluster_name
        self._path = state_dir / f"instance-{cluster_name}.json"
        self._lock_path = self._path.with_suffix(".lock")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes this process the only `up` of the cluster. Raises AlreadyRunning, saying where the other one is."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                record = self.read()
                where = f" (process {record.process.pid}, {record.url})" if record is not None else ""
                raise AlreadyRunning(
                    f"A Remora named {self.cluster_name!r} is running already{where}. Stop it with `remora down`, or "
                    "give this one another cluster.name and http.port."
                ) from None
            yield
        finally:
            os.close(fd)

    def read(self) -> InstanceRecord | None:
        """The record, or None when there is none or it cannot be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=InstanceRecord)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, record: InstanceRecord) -> None:
        """Replaces the record at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        temporary.replace(self._path)

    def remove(self) -> None:
        """Forgets the instance. The lock file stays: who locks a removed file locks nothing."""
        self._path.unlink(missing_ok=True)


def state_dir_of(config: RemoraConfig) -> Path:
    """Where this configuration keeps its state."""
    return config.cluster.state_dir or default_state_dir()


def running_instances(state_dir: Path) -> list[InstanceRecord]:
    """Instances of this state directory whose `up` lives."""
    records = []
    for path in sorted(state_dir.glob("instance-*.json")):
        record = InstanceStore(state_dir, path.stem.removeprefix("instance-")).read()
        if record is not None and record.is_running():
            records.append(record)
    return records


def remove_remains(record: InstanceRecord) -> list[ProcessIdentity]:
    """Kills every process of an instance and removes its Ray's folder. Returns the processes that were killed.

    Its shared memory stays: the next `up` adopts or removes it.
    """
    killed = [record.platform] if is_alive(record.platform) else []
    kill_processes(killed)
    killed += kill_marked(INSTANCE_VARIABLE, record.instance_id)
    temp_dir = Path(record.ray_temp_dir)
    # The record is a file that anybody with this user's rights could have written: remove only what Remora made.
    if record.ray_temp_dir and temp_dir.name.startswith(TEMP_DIR_PREFIX):
        shutil.rmtree(temp_dir, ignore_errors=True)
    return killed


def clear_remains(store: InstanceStore, state_dir: Path, say: Callable[[str], None]) -> None:
    """Before a start: ends what an earlier instance left running, and tells what lies in shared memory."""
    record = store.read()
    if record is not None:
        killed = remove_remains(record)
        if killed:
            say(f"an earlier instance ended badly: killed {len(killed)} processes of it")
        store.remove()
    for path in stale_files(store.cluster_name, SHARED_MEMORY_DIR, state_dir):
        if path.suffix == ".arena":
            say(f"found {path}, left by an earlier instance")


def clear_all(store: InstanceStore, state_dir: Path) -> tuple[list[ProcessIdentity], list[Path]]:
    """After an end: processes, shared memory and the record. Returns the processes killed and the files removed."""
    record = store.read()
    killed = [] if record is None else remove_remains(record)
    removed = remove_stale(store.cluster_name, SHARED_MEMORY_DIR, state_dir)
    store.remove()
    return killed, removed
