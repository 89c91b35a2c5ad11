"""A StateStore in whatever database SQLAlchemy reaches. Only who has one imports this: SQLAlchemy takes its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

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

from remora.platform.base.errors import ConfigError, Unavailable
from remora.platform.base.state_store import AppendRecord, Change, PutValue, RemoveStream

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
