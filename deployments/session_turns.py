"""Turns of sessions that a router writes: begun, kept alive, and committed or given up as a whole.

    begin ─► SessionTurn ── commit ─► the log has prompt and answer
                        └── end ────► the log is as before (disconnect, error, over quota)

A turn whose commit is under way is committed, whatever happens to its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from remora.cache_actors.session_client import SessionPort, ask
from remora.namespaces.edits import ContextOutcome
from remora.namespaces.session_commands import (
    AbortTurn,
    BeginTurn,
    CommitTurn,
    Done,
    RenewTurns,
    SessionHead,
    TurnStarted,
)
from remora.namespaces.session_log import SessionState, pack_tokens, unpack_tokens
from remora.namespaces.session_turn import TurnKind
from remora.platform.base.errors import RemoraError
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, ReplicaId, SessionId

logger = logging.getLogger(__name__)

#: Well below the lease of a turn (namespaces/session_book.py).
RENEW_EVERY_S: Final = 2.5
_STOP_S: Final = 3.0


class SessionTurn:
    """This router is the session's writer. Ended by `commit` or `end`."""

    def __init__(self, turns: SessionTurns, turn_id: str, started: TurnStarted) -> None:
        self._turns = turns
        self.turn_id = turn_id
        self.epoch: Epoch = started.epoch
        #: As it was when the turn began, with the whole token log.
        self.state: SessionState = started.state
        self.token_ids = unpack_tokens(started.state.token_bytes)
        self._committing: asyncio.Task[SessionHead] | None = None
        self._ended = False

    @property
    def session_id(self) -> SessionId:
        return self.state.session_id

    @property
    def is_committed(self) -> bool:
        """Whether a commit was begun; its outcome may be open."""
        return self._committing is not None

    async def commit(
        self,
        kind: TurnKind,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        *,
        messages_json: bytes = b"[]",
        finish_reason: str = "",
        owner: ReplicaId | None = None,
        context: ContextOutcome | None = None,
    ) -> None:
        """Appends the turn's own prompt tokens and its answer. Raises Conflict when another writer took over.

        Goes on when the caller is cancelled.
        """
        command = CommitTurn(
            session_id=self.session_id,
            turn_id=self.turn_id,
            epoch=self.epoch,
            kind=kind,
            prompt_bytes=pack_tokens(prompt_token_ids),
            output_bytes=pack_tokens(output_token_ids),
            messages_json=messages_json,
            finish_reason=finish_reason,
            owner=owner,
            context=context,
        )
        self._committing = self._turns.spawn(self._commit(command))
        await asyncio.shield(self._committing)

    async def _commit(self, command: CommitTurn) -> SessionHead:
        try:
            return await ask(self._turns.port, command, SessionHead)
        except RemoraError as error:
            logger.warning("turn %s of session %s is not kept: %s", self.turn_id, self.session_id, error)
            # If it was kept all the same and only the answer was lost, this changes nothing.
            self._turns.abort(self.session_id, self.turn_id, "its commit failed")
            raise
        finally:
            self._turns.forget(self)

    def end(self, reason: str) -> None:
        """Gives the turn up, unless it was committed. May be called twice."""
        if not self._ended and self._committing is None:
            self._turns.forget(self)
            self._turns.abort(self.session_id, self.turn_id, reason)
        self._ended = True


class SessionTurns:
    """All open turns of one router; lives on its event loop."""

    def __init__(self, port: SessionPort, *, renew_every_s: float = RENEW_EVERY_S) -> None:
        self.port = port
        self._renew_every_s = renew_every_s
        self._open: dict[str, SessionTurn] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def begin(
        self, session_id: SessionId, model_id: ModelId, namespace_id: NamespaceId | None, *, wait_s: float = 0.0
    ) -> SessionTurn:
        """Becomes the session's writer; waits for another up to `wait_s`.

        Raises NotFound, Conflict, InvalidRequest for another model or namespace, Unavailable.
        """
        turn_id = uuid.uuid4().hex
        command = BeginTurn(
            session_id=session_id, turn_id=turn_id, model_id=model_id, namespace_id=namespace_id, wait_s=wait_s
        )
        call = self.spawn(ask(self.port, command, TurnStarted))
        try:
            started = await asyncio.shield(call)
        except asyncio.CancelledError:
            # Now for a turn that waits, and again for one that was on its way.
            self.abort(session_id, turn_id, "the client left")
            call.add_done_callback(lambda _: self.abort(session_id, turn_id, "the client left"))
            raise
        turn = SessionTurn(self, turn_id, started)
        self._open[turn_id] = turn
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), name="session-leases")
        return turn

    async def stop(self) -> None:
        """Gives up all open turns; waits a moment for what is on its way to the registry."""
        for turn in list(self._open.values()):
            turn.end("the router is shutting down")
        if self._renewing is not None:
            self._renewing.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def forget(self, turn: SessionTurn) -> None:
        self._open.pop(turn.turn_id, None)

    def abort(self, session_id: SessionId, turn_id: str, reason: str) -> None:
        """Tells the registry in the background; if that fails, the turn's lease runs out."""
        self.spawn(ask(self.port, AbortTurn(session_id=session_id, turn_id=turn_id, reason=reason), Done))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs to its end even if nobody waits for it any more."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a session call failed: %s", error)

    async def _renew(self) -> None:
        while self._open:
            await asyncio.sleep(self._renew_every_s)
            turns = tuple((turn.session_id, turn.turn_id) for turn in self._open.values())
            if turns:
                with contextlib.suppress(RemoraError):
                    await ask(self.port, RenewTurns(turns=turns), Done)
