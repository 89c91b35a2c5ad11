"""Where a Remora instance keeps its files. All names start with `remora-` and hold the user id and the cluster name."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY_DIR = Path(os.environ.get("REMORA_SHM_DIR", "/dev/shm"))


def default_state_dir() -> Path:
    """`$REMORA_STATE_DIR`, else the user's state directory (XDG base directory specification)."""
    explicit = os.environ.get("REMORA_STATE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "remora"


def shared_memory_prefix(cluster_name: str) -> str:
    """Prefix of every file of this cluster in SHARED_MEMORY_DIR; `remora down` leaves none of them.

    It ends in a character that no name may hold: cluster "a" never takes the files of cluster "a-b" for its own.
    """
    return f"remora-{os.getuid()}-{cluster_name}@"
