"""What an instance that ended badly left behind in shared memory, and its removal (`remora up`, `remora down`)."""

from __future__ import annotations

import logging
from pathlib import Path

from remora.cache_actors.arena import condemn, is_owned
from remora.platform.base import paths

logger = logging.getLogger(__name__)


def arena_path(directory: Path, cluster_name: str, pool_id: str) -> Path:
    """File of a pool's arena."""
    return directory / f"{paths.shared_memory_prefix(cluster_name)}{pool_id}.arena"


def journal_path(arena: Path) -> Path:
    """The journal lies beside its arena."""
    return arena.with_suffix(".journal")


def step_lock_path(directory: Path, cluster_name: str, pool_id: str) -> Path:
    """File through which the replicas of a device take turns."""
    return directory / f"{paths.shared_memory_prefix(cluster_name)}{pool_id}.steplock"


def cluster_files(cluster_name: str, *directories: Path) -> list[Path]:
    """Every file of the cluster in shared memory (or the given directories)."""
    prefix = paths.shared_memory_prefix(cluster_name)
    found: list[Path] = []
    for directory in directories or (paths.SHARED_MEMORY_DIR,):
        if directory.is_dir():
            found += [path for path in directory.iterdir() if path.name.startswith(prefix)]
    return sorted(found)


def stale_files(cluster_name: str, *directories: Path) -> list[Path]:
    """Files of pools that no living process owns. An arena among them can still be adopted with its journal."""
    files = cluster_files(cluster_name, *directories)
    owned = {path.name.removesuffix(".arena") for path in files if path.suffix == ".arena" and is_owned(path)}
    return [path for path in files if not any(path.name.startswith(f"{stem}.") for stem in owned)]


def remove_stale(cluster_name: str, *directories: Path) -> list[Path]:
    """Removes stale files and returns them. Processes that still map a removed arena are told to stop emitting."""
    removed = stale_files(cluster_name, *directories)
    for path in removed:
        if path.suffix == ".arena":
            condemn(path)
        path.unlink(missing_ok=True)
        logger.info("removed stale %s", path)
    return removed
