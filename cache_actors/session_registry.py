"""The sessions of a cluster and their store: decides in memory, writes in batches, answers when it is on disk.

    command ─► SessionBook.decide ─► queue ─► one writer thread ─► answer
                                      └── everything that queued meanwhile goes into the next transaction

The book is read from the store at the first command. When a write fails, what was decided since is given up: the book
is thrown away and read again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from remora.namespaces.session_book import SessionBook, Stored
from remora.namespaces.session_commands import (
    AbortTurn,
    BeginTurn,
    CommitTurn,
    Done,
    SessionAnswer,
    SessionCommand,
    SessionHead,
    SessionRefused,
)
from remora.namespaces.session_log import Appended, SessionEvent, TurnAborted
from remora.platform.base.errors import RemoraError, Unavailable
from remora.platform.base.ids import Epoch, SessionId
from remora.platform.base.state_store import AppendRecord, Change, PutValue, RemoveStream, StateStore

logger = logging.getLogger(__name__)

#: Longest wait for another writer of the session.
MAX_WAIT_S: Final = 600.0
_PREFIX: Final = "session/"
_EPOCH_FLOOR: Final = "sessions.epoch_floor"
_CLUSTER: Final = "sessions.cluster"
_events_decoder = msgspec.msgpack.Decoder(SessionEvent)
_encoder = msgspec.msgpack.Encoder()
#: Must not raise.
OnRemoved = Callable[[list[SessionId]], Coroutine[Any, Any, None]]
T = TypeVar("T")


class SessionRegistry:
    """Lives on one event loop. `close` writes what is queued."""

    def __init__(
        self,
        open_store: Callable[[], StateStore],
        *,
        cluster_id: str,
        now_s: Callable[[], float] = time.time,
        expire_every_s: float = 1.0,
        on_removed: OnRemoved | None = None,
    ) -> None:
        """`cluster_id` changes when all routers have ended: turns that were open under another are given up.

        `now_s` is wall-clock time, because it is stored. `on_removed` is told which sessions are gone for good, whether
        deleted, expired, or gone to make room.
        """
        self._open_store = open_store
        self._cluster_id = cluster_id
        self._now_s = now_s
        self._expire_every_s = expire_every_s
        self._on_removed = on_removed
        self._telling: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-store")
        self._opening: asyncio.Task[SessionBook] | None = None
        self._store: StateStore | None = None
        self._queue: list[tuple[list[Change], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._expiring: asyncio.Task[None] | None = None
        #: Set when the session's writer ends.
        self._released: dict[SessionId, asyncio.Event] = {}
        #: Turns that wait for another writer, and those of them that no longer want to.
        self._waiting: set[str] = set()
        self._withdrawn: set[str] = set()

    async def call(self, command: SessionCommand) -> SessionAnswer:
        """The answer to a command; a store that cannot be used is a refusal too."""
        try:
            if isinstance(command, AbortTurn) and command.turn_id in self._waiting:
                self._withdrawn.add(command.turn_id)
                self._release(command.session_id)
                return Done()
            return await self._wait_for_turn(command) if isinstance(command, BeginTurn) else await self._do(command)
        except RemoraError as error:
            logger.error("sessions: %s", error)
            return SessionRefused(error="Unavailable", message=str(error))

    async def close(self) -> None:
        """Writes what is queued and closes the store."""
        if self._expiring is not None:
            self._expiring.cancel()
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._store is not None:
            await self._in_thread(self._store.close)
        self._thread.shutdown()

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant of the book is broken."""
        if self._opening is not None and self._opening.done() and self._opening.exception() is None:
            self._opening.result().check_integrity()

    # ---- commands ----------------------------------------------------------------------------------------------------

    async def _wait_for_turn(self, command: BeginTurn) -> SessionAnswer:
        """Serialises writers: in the order in which they came, each within its own time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + min(command.wait_s, MAX_WAIT_S)
        self._waiting.add(command.turn_id)
        try:
            while True:
                answer = await self._do(command)
                if not isinstance(answer, SessionRefused) or not answer.busy or loop.time() >= deadline_s:
                    return answer
                released = self._released.setdefault(command.session_id, asyncio.Event())
                try:
                    await asyncio.wait_for(released.wait(), deadline_s - loop.time())
                except TimeoutError:
                    return answer
                if command.turn_id in self._withdrawn:
                    return answer
        finally:
            self._waiting.discard(command.turn_id)
            self._withdrawn.discard(command.turn_id)

    async def _do(self, command: SessionCommand) -> SessionAnswer:
        book = await self._book()
        answer, records = book.decide(command, self._now_s())
        if records:
            written = self._enqueue(book, records)
            if not (isinstance(command, CommitTurn) and isinstance(answer, SessionHead) and not answer.state.durable):
                await asyncio.shield(written)
        return answer

    # ---- the store ---------------------------------------------------------------------------------------------------

    async def _book(self) -> SessionBook:
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._open(), name="sessions-open")
        return await asyncio.shield(self._opening)

    async def _open(self) -> SessionBook:
        started_s = time.monotonic()
        if self._store is None:
            self._store = await self._in_thread(self._open_store)
        store = self._store
        book, cluster_id = await self._in_thread(lambda: _read(store, self._now_s()))
        aborted = book.abort_all(self._now_s()) if cluster_id != self._cluster_id else ()
        changes = [*_changes(book, aborted), PutValue(_CLUSTER, self._cluster_id.encode())]
        await self._in_thread(lambda: store.write(changes))
        logger.info("%d sessions were read in %.2f s", len(book), time.monotonic() - started_s)
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._expire(), name="sessions-expire")
        return book

    def _enqueue(self, book: SessionBook, records: Sequence[Stored]) -> asyncio.Future[None]:
        """Queues what was decided; the future is done when it is on disk. Wakes who waits for a writer's end."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Of a turn that is not durable nobody looks at the outcome.
        written.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._queue.append((_changes(book, records), written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="sessions-write")
        for record in records:
            if record.event is None or isinstance(record.event, Appended | TurnAborted):
                self._release(record.session_id)
        return written

    async def _write(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            store = self._store
            assert store is not None
            changes = [change for each, _ in batch for change in each]
            try:
                await self._in_thread(lambda: store.write(changes))  # noqa: B023  (awaited within the same round)
            except Exception as error:
                # Whatever it was, what is in memory is ahead of the store now.
                logger.exception("sessions are read again")
                self._opening = None
                batch, self._queue = batch + self._queue, []
                for _, written in batch:
                    written.set_exception(Unavailable(f"the session could not be stored: {error}"))
                return
            for _, written in batch:
                written.set_result(None)
            self._tell_removed([each.stream for each in changes if isinstance(each, RemoveStream)])

    def _tell_removed(self, streams: list[str]) -> None:
        if self._on_removed is not None and streams:
            gone = [SessionId(stream.removeprefix(_PREFIX)) for stream in streams]
            task = asyncio.create_task(self._on_removed(gone))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._expire_every_s)
            try:
                book = await self._book()
                records = book.expire(self._now_s())
                if records:
                    self._enqueue(book, records)
            except RemoraError as error:
                logger.error("sessions: %s", error)

    def _release(self, session_id: SessionId) -> None:
        released = self._released.pop(session_id, None)
        if released is not None:
            released.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _read(store: StateStore, now_s: float) -> tuple[SessionBook, str]:
    """The book as it is stored, and the cluster that wrote it."""
    floor = store.value(_EPOCH_FLOOR)
    book = SessionBook()
    events = (
        (SessionId(stream.removeprefix(_PREFIX)), _events_decoder.decode(data))
        for stream, data in store.records()
        if stream.startswith(_PREFIX)
    )
    book.restore(events, Epoch(int(floor or b"0")), now_s)
    return book, (store.value(_CLUSTER) or b"").decode()


def _changes(book: SessionBook, records: Sequence[Stored]) -> list[Change]:
    changes: list[Change] = []
    for record in records:
        stream = f"{_PREFIX}{record.session_id}"
        if record.event is None:
            changes += [RemoveStream(stream), PutValue(_EPOCH_FLOOR, str(book.epoch_floor).encode())]
        else:
            changes.append(AppendRecord(stream, record.version, _encoder.encode(record.event)))
    return changes
