"""A replica's lease on a pool actor (a PoolPort): numbered commands out, answers and events in.

    engine thread        event loop of the replica              pool actor
    send ──► queue ──►   one batch in flight  ───── call ─────► apply, journal, answer
                         resent under the same numbers after a crash of the pool
    on_answer ◄───────   answers in order     ◄──────────────── (over a link: pool_call_link.py)
    on_event  ◄───────   events, never before the answers they follow ◄── wait_events (long poll)

The lease ends badly in one way only: `lost` is set, `may_emit` is False for ever, whatever is queued is answered
`Refused`, and `on_lost` is called once. The replica then stops; a new process gets a new lease.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from remora.cache_actors.arena import ArenaView, MappedArena
from remora.cache_actors.arena_place import map_arena
from remora.cache_actors.pool_call_link import PoolCallLink
from remora.cache_actors.pool_calls import await_pool, until_answered
from remora.cache_actors.pool_messages import PoolBinding, decode_call_reply, decode_events_reply, encode_commands
from remora.cache_actors.port import EngineCommand, OnAnswer, OnEvent
from remora.cache_actors.process_watch import process_identity
from remora.namespaces.commands import (
    AddFormat,
    AnyAnswer,
    AnyCommand,
    AnyEvent,
    Attach,
    Attached,
    AttachRefused,
    Detach,
    FormatAdded,
    ProcessIdentity,
    Refused,
)
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import ArenaError, PoolError
from remora.platform.base.ids import LeaseId, ModelId, ReplicaId

logger = logging.getLogger(__name__)

#: Commands in one RPC; well below the number of answers that a pool keeps for repeats.
MAX_BATCH: Final = 64
_LONG_POLL_S: Final = 10.0
#: Refusals after which the numbering of the lease, or the lease itself, is gone.
_FATAL: Final = frozenset({"StaleLease", "CallOrder", "IntegrityError"})


OnLost = Callable[[str], None]


class PoolClient:
    """One lease. Made by `attach` on the replica's event loop; `send` and `may_emit` are for the engine thread."""

    def __init__(
        self, pool: Any, binding: PoolBinding, arena: MappedArena | None, attach: Attach, on_lost: OnLost | None
    ) -> None:
        """For `attach` only."""
        self.binding: Final = binding
        self._arena: Final = arena
        self._geometry: Final = attach.geometry
        self.lease_id: Final = attach.lease_id
        self.attached: Attached | None = None
        self.lost: str | None = None
        self._pool = pool
        self._calls = PoolCallLink(pool, attach.lease_id)
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._on_answer: OnAnswer | None = None
        self._on_event: OnEvent | None = None
        self._lock = threading.Lock()
        self._queue: deque[AnyCommand] = deque([attach])
        self._next_call_no = 2
        self._closing = False
        self._wake = asyncio.Event()
        self._wake_pending = False
        #: Answers up to this call number were delivered.
        self._answered_call_no = 0
        self._event_no = 0
        #: Events that came before an answer they follow: (delivered once this call is answered, events).
        self._early: list[tuple[int, tuple[AnyEvent, ...]]] = []
        #: Who waits for the answer to a call by `ask`.
        self._asked: dict[int, asyncio.Future[AnyAnswer]] = {}
        self._first_answer: asyncio.Future[AnyAnswer] = self._loop.create_future()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    async def attach(
        pool: Any,
        *,
        replica_id: ReplicaId,
        model_id: ModelId,
        geometry: KVGeometry,
        fingerprint: bytes,
        relocates: bool = False,
        reserved_bytes: int = 0,
        process: ProcessIdentity | None = None,
        maps: bool = True,
        on_lost: OnLost | None = None,
    ) -> PoolClient:
        """Maps the arena and registers this process. `on_lost(reason)` is called on the loop. `relocates`: whoever uses
        the lease takes `Relocate` events; an engine does. `process`: of the pool's node, if another one writes than
        this: what the lease holds is free when it is gone. `maps`: False for a pool of another node, whose memory only
        that process reaches; `may_emit` then tells what the pool has said, and that process must look for itself.

        Raises PoolError when the pool refuses (the reason says why), ArenaError when the pool could not start or its
        memory cannot be mapped.
        """
        binding = await await_pool(pool)
        arena = map_arena(Path(binding.arena_path), binding.ipc_handle) if maps else None
        attach = Attach(
            lease_id=LeaseId(f"{replica_id}:{os.getpid()}:{uuid.uuid4().hex}"),
            call_no=1,
            replica_id=replica_id,
            model_id=model_id,
            geometry=geometry,
            fingerprint=fingerprint,
            process=process_identity() if process is None else process,
            relocates=relocates,
            reserved_bytes=reserved_bytes,
        )
        client = PoolClient(pool, binding, arena, attach, on_lost)
        client._tasks = [asyncio.create_task(client._run_calls(), name=f"pool-calls-{replica_id}")]
        answer = await client._first_answer
        if not isinstance(answer, Attached):
            await client._stop()
            reason = answer.reason if isinstance(answer, AttachRefused) else str(answer)
            raise PoolError(f"pool {binding.pool_id} refuses replica {replica_id}: {reason}")
        if arena is not None and answer.incarnation != arena.header.incarnation:
            await client._stop()
            raise ArenaError(f"{binding.arena_path}: the pool restarted with a new arena; attach again")
        client.attached = answer
        client._tasks.append(asyncio.create_task(client._run_events(), name=f"pool-events-{replica_id}"))
        return client

    @property
    def memory(self) -> ArenaView:
        """The pool's memory in the lease's geometry."""
        return self._view(self._geometry)

    def _view(self, geometry: KVGeometry) -> ArenaView:
        assert self._arena is not None, "a lease that maps nothing has no memory to show"
        return ArenaView(self._arena, geometry)

    async def detach(self) -> None:
        """Ends the lease after everything queued is answered; the pool then releases what it still holds."""
        with self._lock:
            already, self._closing = self._closing, True
            if not already:
                self._queue.append(Detach(lease_id=self.lease_id, call_no=self._take_call_no()))
        self._wake.set()
        await self._done
        await self._stop()

    async def abandon(self) -> None:
        """Ends the lease here, whatever the pool does: its process is gone, or the pool's node."""
        with self._lock:
            self._closing = True
        await self._stop()

    def bind(self, on_answer: OnAnswer, on_event: OnEvent) -> None:
        """Where answers and events go; called on the replica's event loop, in order."""
        self._on_answer, self._on_event = on_answer, on_event

    def send(self, command: EngineCommand) -> None:
        """Queues the command for the next RPC. Thread-safe. Raises PoolError after `detach`."""
        self._enqueue(command, None)

    async def ask(self, command: EngineCommand) -> AnyAnswer:
        """The answer to a command, which then does not go to where `bind` said. On the replica's event loop only."""
        answer: asyncio.Future[AnyAnswer] = self._loop.create_future()
        self._enqueue(command, answer)
        return await answer

    async def add_format(self, geometry: KVGeometry, fingerprint: bytes) -> ArenaView:
        """The memory as sequences of one more precision see it. On the replica's event loop only.

        Raises PoolError when the pool refuses; the reason says why.
        """
        answer = await self.ask(AddFormat(lease_id=self.lease_id, geometry=geometry, fingerprint=fingerprint))
        if not isinstance(answer, FormatAdded):
            reason = answer.message if isinstance(answer, Refused) else str(answer)
            raise PoolError(f"pool {self.binding.pool_id} refuses a precision: {reason}")
        return self._view(geometry)

    def _enqueue(self, command: EngineCommand, asked: asyncio.Future[AnyAnswer] | None) -> None:
        with self._lock:
            if self._closing:
                raise PoolError("the lease is being given back: nothing can be sent any more")
            call_no = self._take_call_no()
            self._queue.append(msgspec.structs.replace(command, lease_id=self.lease_id, call_no=call_no))
            if asked is not None:
                self._asked[call_no] = asked
            wake = not self._wake_pending
            self._wake_pending = True
        if wake:
            self._loop.call_soon_threadsafe(self._wake.set)

    def may_emit(self) -> bool:
        """False once the lease is lost: reads two words of shared memory."""
        attached, arena = self.attached, self._arena
        return (
            attached is not None
            and self.lost is None
            and (arena is None or arena.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation))
        )

    def _take_call_no(self) -> int:
        call_no = self._next_call_no
        self._next_call_no += 1
        return call_no

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def _run_calls(self) -> None:
        try:
            while not self._done.done():
                batch = self._take_batch()
                if not batch:
                    await self._wake.wait()
                    continue
                if self.lost is not None:
                    reply_answers: tuple[AnyAnswer, ...] = tuple(self._refusal() for _ in batch)
                    self._deliver(batch, reply_answers)
                    continue
                data = encode_commands(batch)
                reply = decode_call_reply(await self._calls.call(data, self._event_no))
                self._deliver(batch, reply.answers)
                self._take_events(reply.events, reply.last_call_no)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                logger.exception("the calls of lease %s ended", self.lease_id)
                self._lose(f"calls ended: {error!r}")
            futures: list[asyncio.Future[Any]] = [self._first_answer, self._done, *self._asked.values()]
            for future in futures:
                if not future.done():
                    future.cancel() if isinstance(error, asyncio.CancelledError) else future.set_exception(error)
            raise

    def _take_batch(self) -> list[AnyCommand]:
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            if not batch:
                self._wake.clear()
                self._wake_pending = False
        return batch

    def _deliver(self, batch: list[AnyCommand], answers: tuple[AnyAnswer, ...]) -> None:
        for command, answer in zip(batch, answers, strict=True):
            self._answered_call_no = command.call_no
            if isinstance(answer, Refused) and answer.error in _FATAL:
                self._lose(answer.message)
            if isinstance(command, Attach):
                self._first_answer.set_result(answer)
            elif isinstance(command, Detach):
                self._done.set_result(None)
            elif (asked := self._asked.pop(command.call_no, None)) is not None:
                if not asked.done():
                    asked.set_result(answer)
            elif self._on_answer is not None:
                self._on_answer(command, answer)  # type: ignore[arg-type]  # send takes engine commands only
        early, self._early = self._early, []
        for last_call_no, events in early:
            self._take_events(events, last_call_no)

    def _refusal(self) -> Refused:
        return Refused(error="StaleLease", message=self.lost or "")

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            logger.error("lease %s is lost: %s", self.lease_id, reason)
            if self._on_lost is not None:
                self._on_lost(reason)

    # ---- events ------------------------------------------------------------------------------------------------------

    async def _run_events(self) -> None:
        try:
            await self._follow_events()
        except Exception as error:  # the pool is gone for good, with its node
            self._lose(f"events ended: {error!r}")

    async def _follow_events(self) -> None:
        while self.lost is None:
            seen_no = max([self._event_no, *(events[-1].event_no for _, events in self._early)])
            reply = decode_events_reply(
                await until_answered(partial(self._pool.wait_events.remote, self.lease_id, seen_no, _LONG_POLL_S))
            )
            if not reply.lease_known:
                if not self._closing:
                    self._lose("the pool does not know the lease any more")
                return
            if not self.may_emit() and not self._closing:
                self._lose("the lease's generation has changed")
                return
            self._take_events(reply.events, reply.last_call_no)

    def _take_events(self, events: tuple[AnyEvent, ...], last_call_no: int) -> None:
        if not events:
            return
        if last_call_no > self._answered_call_no:
            self._early.append((last_call_no, events))
            return
        for event in events:
            if event.event_no > self._event_no:
                self._event_no = event.event_no
                if self._on_event is not None:
                    self._on_event(event)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._calls.close()
        self.attached = None
        if self._arena is not None:
            self._arena.close()
