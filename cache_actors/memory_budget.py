"""Where an arena fits: /dev/shm if Ray's object store still fits beside it, else a file, else nowhere (design 4.10)."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from remora.platform.base.errors import ArenaError

logger = logging.getLogger(__name__)

Backing = Literal["shm", "file"]
MiB = 1024 * 1024


class Place(NamedTuple):
    directory: Path
    backing: Backing


def free_bytes(directory: Path) -> int:
    """Bytes that a user may still allocate in the file system of `directory`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping: the node's, or what the cgroup leaves when that is less."""
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match.group(1)) * 1024 if match else 1 << 62
    for limit_name, used_name in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_name).read_text().strip(), Path(used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            available = min(available, int(limit) - int(used))
    return available


def choose_place(
    file_bytes: int, *, device_name: str, shm_dir: Path, state_dir: Path, object_store_bytes: int, spare_bytes: int
) -> Place:
    """Where to put an arena file of `file_bytes`, with `spare_bytes` beside it for its journal.

    Ray allocates its object store lazily in the same /dev/shm, so its whole size counts as taken. A file in the state
    directory works too, but its pages are written back to disk. Raises ArenaError naming the limit to raise.
    """
    needed = file_bytes + spare_bytes
    memory = available_memory_bytes()
    if needed > memory:
        raise ArenaError(
            f"devices.{device_name}.arena_bytes: an arena of {_mib(needed)} does not fit the {_mib(memory)} of memory "
            "that are available; lower arena_bytes, or raise the memory limit of the container"
        )
    shm_free = free_bytes(shm_dir)
    if needed + object_store_bytes <= shm_free:
        return Place(shm_dir, "shm")
    advice = (
        f"{shm_dir} has {_mib(shm_free)} free, but the arena of device {device_name!r} needs {_mib(needed)} beside "
        f"Ray's object store of {_mib(object_store_bytes)}. Raise its size (docker: --shm-size, Kubernetes: sizeLimit "
        f"of the /dev/shm volume, Linux: mount -o remount,size=... {shm_dir}), or lower devices.{device_name}."
        "arena_bytes or cluster.object_store_bytes"
    )
    state_dir.mkdir(parents=True, exist_ok=True)
    disk_free = free_bytes(state_dir)
    if needed <= disk_free:
        logger.warning("%s. Using a file in %s instead: slower, it is written back to disk", advice, state_dir)
        return Place(state_dir, "file")
    raise ArenaError(f"{advice}. A file in {state_dir} does not fit either: {_mib(disk_free)} free")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MiB:.0f} MiB"
