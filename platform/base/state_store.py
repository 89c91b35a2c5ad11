"""Durable state as streams of numbered records, in whatever database SQLAlchemy reaches.

    stream "session/abc"   1 ─ 2 ─ 3 ─ ...      appended in order, removed as a whole
    value  "epoch_floor"   one blob             replaced

One writer. `write` is one transaction: all of a batch is there after a crash, or nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    event,
    insert,
    select,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from remora.platform.base.config import ClusterConfig
from remora.platform.base.errors import ConfigError, Unavailable
from remora.platform.base.paths import default_state_dir

_METADATA: Final = MetaData()
_RECORDS: Final = Table(
    "remora_records",
    _METADATA,
    Column("stream", String(512), primary_key=True),
    Column("record_no", BigInteger, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)
_VALUES: Final = Table(
    "remora_values",
    _METADATA,
    Column("name", String(128), primary_key=True),
    Column("data", LargeBinary, nullable=False),
)


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


def check_database_url(url: str) -> URL:
    """The URL, with the driver that is used for it. Connects to nothing. Raises ConfigError for what is no database
    URL, and when its driver is not installed."""
    try:
        parsed = make_url(url)
        if parsed.drivername == "postgresql":  # the driver of the extra `postgres`, whatever SQLAlchemy would choose
            parsed = parsed.set(drivername="postgresql+psycopg")
        parsed.get_dialect().import_dbapi()
    except ArgumentError:
        message = "cluster.database_url (or $REMORA_DATABASE_URL): not a URL as SQLAlchemy writes it"
        raise ConfigError(message) from None
    except ModuleNotFoundError as error:
        shown = parsed.render_as_string(hide_password=True)
        extra = ", which the extra `postgres` brings" if error.name == "psycopg" else ""
        raise ConfigError(f"cluster.database_url: {shown} needs the Python package {error.name}{extra}") from None
    return parsed


class SqlStateStore:
    """A StateStore on a database URL. SQLite runs in WAL mode and syncs every transaction to disk; a server that was
    away is found again at the next call."""

    def __init__(self, url: str) -> None:
        """Creates file and tables where they are missing. Raises Unavailable; ConfigError for what is no URL."""
        parsed = check_database_url(url)
        self._url = parsed.render_as_string(hide_password=True)
        try:
            if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
                path = Path(str(parsed.database))
                path.parent.mkdir(parents=True, exist_ok=True)
                # Conversations are nobody else's; SQLite gives its WAL the same mode.
                path.touch(mode=0o600)
            self._engine = create_engine(parsed, pool_pre_ping=True)
            if parsed.get_backend_name() == "sqlite":
                event.listen(self._engine, "connect", _set_up_sqlite)
            _METADATA.create_all(self._engine)
        except (SQLAlchemyError, ImportError, OSError) as error:
            raise self._unavailable(error) from None

    def write(self, changes: Sequence[Change]) -> None:
        try:
            with self._engine.begin() as connection:
                for change in changes:
                    match change:
                        case AppendRecord(stream=stream, record_no=record_no, data=data):
                            values = {"stream": stream, "record_no": record_no, "data": data}
                            connection.execute(insert(_RECORDS).values(values))
                        case RemoveStream(stream=stream):
                            connection.execute(delete(_RECORDS).where(_RECORDS.c.stream == stream))
                        case PutValue(name=name, data=data):
                            connection.execute(delete(_VALUES).where(_VALUES.c.name == name))
                            connection.execute(insert(_VALUES).values({"name": name, "data": data}))
        except SQLAlchemyError as error:
            raise self._unavailable(error) from None

    def records(self) -> Iterator[tuple[str, bytes]]:
        query = select(_RECORDS.c.stream, _RECORDS.c.data).order_by(_RECORDS.c.stream, _RECORDS.c.record_no)
        try:
            with self._engine.connect() as connection:
                for stream, data in connection.execution_options(yield_per=1000).execute(query):
                    yield stream, bytes(data)
        except SQLAlchemyError as error:
            raise self._unavailable(error) from None

    def value(self, name: str) -> bytes | None:
        try:
            with self._engine.connect() as connection:
                found = connection.execute(select(_VALUES.c.data).where(_VALUES.c.name == name)).scalar_one_or_none()
        except SQLAlchemyError as error:
            raise self._unavailable(error) from None
        return None if found is None else bytes(found)

    def close(self) -> None:
        self._engine.dispose()

    def _unavailable(self, error: Exception) -> Unavailable:
        reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
        return Unavailable(f"the state store {self._url} cannot be used: {reason}", retry_after_s=5.0)


def _set_up_sqlite(connection: object, _record: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]  # a DBAPI connection
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
