"""Durable state as streams of numbered records.

    stream "session/abc"   1 ─ 2 ─ 3 ─ ...      appended in order, removed as a whole
    value  "epoch_floor"   one blob             replaced

One writer. `write` is one transaction: all of a batch is there after a crash, or nothing of it. Databases:
sql_state_store.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from remora.platform.base.config import ClusterConfig
from remora.platform.base.paths import default_state_dir


class AppendRecord(msgspec.Struct, frozen=True):
    """The next record of a stream. A number that is there already is a second writer: Unavailable."""

    stream: str
    record_no: int
    data: bytes


class RemoveStream(msgspec.Struct, frozen=True):
    stream: str


class PutValue(msgspec.Struct, frozen=True):
    name: str
    data: bytes


Change = AppendRecord | RemoveStream | PutValue


class StateStore(Protocol):
    """Blocking: call from a thread of its own. Every method raises Unavailable when the store cannot be used."""

    def write(self, changes: Sequence[Change]) -> None:
        """All of them in order, in one transaction; returns when they are on disk."""
        ...

    def records(self) -> Iterator[tuple[str, bytes]]:
        """(stream, data) of every record, each stream in the order of its numbers."""
        ...

    def value(self, name: str) -> bytes | None: ...

    def close(self) -> None: ...


def default_database_url(state_dir: Path, cluster_name: str) -> str:
    """The cluster's own SQLite file."""
    return f"sqlite:///{state_dir.absolute()}/state-{cluster_name}.sqlite"


def database_url_of(cluster: ClusterConfig) -> str:
    """The configured one, else `$REMORA_DATABASE_URL`, which may hold a password, else a SQLite file."""
    own = default_database_url(cluster.state_dir or default_state_dir(), cluster.name)
    return cluster.database_url or os.environ.get("REMORA_DATABASE_URL") or own
