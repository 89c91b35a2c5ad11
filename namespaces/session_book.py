"""All sessions of a cluster: which commands are allowed, and the events they become.

`decide(command, now_s)` changes the book and returns the answer with the records that the shell must store before the
answer leaves; `restore` builds the book again from what is stored. Deterministic, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from remora.namespaces.session_commands import (
    AbortTurn,
    BeginTurn,
    CommitTurn,
    CreateSession,
    DeleteSession,
    Done,
    ForkSession,
    ListSessions,
    MoveSession,
    PinSession,
    RemoveTokens,
    RenewTurns,
    SessionAnswer,
    SessionCommand,
    SessionHead,
    SessionList,
    SessionRefused,
    ShowSession,
    TruncateSession,
    TurnStarted,
)
from remora.namespaces.session_forks import forked, moved
from remora.namespaces.session_log import (
    EPOCHS_PER_TURN,
    Appended,
    Created,
    ModelLog,
    Pinned,
    RangeRemoved,
    SessionEvent,
    SessionState,
    Truncated,
    TurnAborted,
    TurnBegun,
    apply,
    check_state,
)
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import Epoch, NamespaceId, SessionId

#: A writer that has not been heard of for so long has lost its turn.
LEASE_S: Final = 10.0


class Stored(NamedTuple):
    """Event number `version` of a session; an event of None removes all of the session."""

    session_id: SessionId
    version: int
    event: SessionEvent | None


class Decision(NamedTuple):
    answer: SessionAnswer
    records: tuple[Stored, ...]


class _Refuse(Exception):
    def __init__(self, error: str, message: str, field: str | None = None, *, busy: bool = False) -> None:
        self.answer = SessionRefused(error=error, message=message, field=field, busy=busy)


class SessionBook:
    """Not thread-safe; owned by the session registry."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._sessions: dict[SessionId, SessionState] = {}
        #: Until when the writer of an open turn is believed to live.
        self._deadline_s: dict[SessionId, float] = {}
        #: No session that was removed had a higher epoch: a new one of the same name starts here.
        self.epoch_floor = Epoch(0)
        self._records: list[Stored] = []

    # ---- life --------------------------------------------------------------------------------------------------------

    def restore(self, records: Iterable[tuple[SessionId, SessionEvent]], epoch_floor: Epoch, now_s: float) -> None:
        """Takes over what was stored, each session's events in order. Open turns get a whole lease from now."""
        self.epoch_floor = epoch_floor
        for session_id, event in records:
            self._sessions[session_id] = apply(self._sessions.get(session_id), event)
        self._deadline_s = {key: now_s + self._lease_s for key, each in self._sessions.items() if each.open_turn}

    def decide(self, command: SessionCommand, now_s: float) -> Decision:
        """The answer, and what must be stored before it leaves. A refusal changes nothing."""
        self._records = []
        try:
            answer = self._answer(command, now_s)
        except _Refuse as refused:
            answer = refused.answer
        return Decision(answer, tuple(self._records))

    def expire(self, now_s: float) -> tuple[Stored, ...]:
        """Ends turns whose writer is gone and removes sessions past their TTL; what must be stored."""
        self._records = []
        for session_id in [key for key, deadline_s in self._deadline_s.items() if deadline_s <= now_s]:
            self._abort(self._sessions[session_id], "its writer was not heard of", now_s)
        for state in [each for each in self._sessions.values() if self._is_expired(each, now_s)]:
            self._remove(state)
        return tuple(self._records)

    def abort_all(self, now_s: float) -> tuple[Stored, ...]:
        """Ends every open turn: their writers belonged to a cluster that is gone."""
        self._records = []
        for state in [each for each in self._sessions.values() if each.open_turn]:
            self._abort(state, "the cluster ended under it", now_s)
        return tuple(self._records)

    def __len__(self) -> int:
        return len(self._sessions)

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant is broken."""
        for session_id, state in self._sessions.items():
            check_state(state)
            if state.session_id != session_id:
                raise IntegrityError(f"session {state.session_id} is filed under {session_id}")
        if {key for key, each in self._sessions.items() if each.open_turn} != self._deadline_s.keys():
            raise IntegrityError("a session has an open turn without a lease, or a lease without an open turn")

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _answer(self, command: SessionCommand, now_s: float) -> SessionAnswer:
        match command:
            case CreateSession():
                return self._create(command, now_s)
            case ForkSession():
                return self._fork(command, now_s)
            case TruncateSession():
                return self._truncate(command, now_s)
            case RemoveTokens():
                return self._remove_tokens(command, now_s)
            case PinSession(session_id=session_id, pinned=pinned):
                state = self._find(session_id, now_s)
                if state.pinned != pinned:
                    state = self._apply(session_id, Pinned(at_s=now_s, pinned=pinned))
                return _head(state)
            case MoveSession():
                return self._move(command, now_s)
            case DeleteSession(session_id=session_id):
                self._remove(self._find(session_id, now_s))
                return Done()
            case ShowSession(session_id=session_id, with_tokens=with_tokens):
                return _head(self._find(session_id, now_s), with_tokens=with_tokens)
            case ListSessions():
                return self._list(command, now_s)
            case BeginTurn():
                return self._begin(command, now_s)
            case CommitTurn():
                return self._commit(command, now_s)
            case AbortTurn(session_id=session_id, turn_id=turn_id, reason=reason):
                found = self._sessions.get(session_id)
                if found is not None and found.open_turn is not None and found.open_turn.turn_id == turn_id:
                    self._abort(found, reason, now_s)
                return Done()
            case RenewTurns(turns=turns):
                for session_id, turn_id in turns:
                    found = self._sessions.get(session_id)
                    if found is not None and found.open_turn is not None and found.open_turn.turn_id == turn_id:
                        self._deadline_s[session_id] = now_s + self._lease_s
                return Done()

    def _create(self, command: CreateSession, now_s: float) -> SessionHead:
        existing = self._existing(command.session_id, command.call_id, now_s)
        if existing is not None:
            return _head(existing)
        self._make_room(command.namespace_id, command.max_sessions, now_s)
        event = Created(
            at_s=now_s,
            session_id=command.session_id,
            model_id=command.model_id,
            namespace_id=command.namespace_id,
            tenant=command.tenant,
            ttl_s=command.ttl_s,
            priority=command.priority,
            durable=command.durable,
            epoch=self.epoch_floor,
            call_id=command.call_id,
            context=command.context,
        )
        return _head(self._apply(command.session_id, event))

    def _fork(self, command: ForkSession, now_s: float) -> SessionHead:
        parent = self._find(command.session_id, now_s)
        existing = self._existing(command.new_id, command.call_id, now_s)
        if existing is not None:
            return _head(existing)
        num_tokens = parent.num_tokens if command.num_tokens is None else command.num_tokens
        self._check_position(parent, num_tokens)
        namespace_id = parent.namespace_id
        if command.log is not None:
            _require_version(parent, command.log)
            namespace_id = command.log.namespace_id
        self._make_room(namespace_id, command.max_sessions, now_s, spare=parent.session_id)
        event = forked(parent, command, num_tokens, epoch=self.epoch_floor, at_s=now_s)
        return _head(self._apply(command.new_id, event))

    def _move(self, command: MoveSession, now_s: float) -> SessionHead:
        state = self._find(command.session_id, now_s)
        _require_idle(state)
        event = moved(state, command, at_s=now_s)
        if event is None:
            return _head(state)
        if command.log is not None:
            _require_version(state, command.log)
            if command.log.namespace_id != state.namespace_id:
                self._make_room(command.log.namespace_id, command.max_sessions, now_s)
        return _head(self._apply(command.session_id, event))

    def _truncate(self, command: TruncateSession, now_s: float) -> SessionHead:
        state = self._find(command.session_id, now_s)
        if command.call_id in state.edit_ids:
            return _head(state)
        if (command.num_tokens is None) == (command.num_turns is None):
            raise _Refuse("InvalidRequest", "num_tokens: give either num_tokens or num_turns.", "num_tokens")
        if command.num_turns is not None:
            if not 0 <= command.num_turns <= len(state.turns):
                raise _Refuse(
                    "InvalidRequest", f"num_turns: {command.num_turns} is not 0 to {len(state.turns)}.", "num_turns"
                )
            num_tokens = state.turns[command.num_turns - 1].end if command.num_turns else 0
        else:
            num_tokens = command.num_tokens or 0
        self._check_position(state, num_tokens)
        _require_idle(state)
        if num_tokens != state.num_tokens:
            state = self._cut(state, num_tokens, command.call_id, now_s)
        return _head(state)

    def _remove_tokens(self, command: RemoveTokens, now_s: float) -> SessionHead:
        state = self._find(command.session_id, now_s)
        if command.call_id in state.edit_ids:
            return _head(state)
        end = state.num_tokens if command.end is None else command.end
        if not 0 <= command.start <= end <= state.num_tokens:
            message = f"start, end: {command.start}, {end} is not a range within 0 to {state.num_tokens}."
            raise _Refuse("InvalidRequest", message, "start")
        _require_idle(state)
        if command.start < end == state.num_tokens:
            state = self._cut(state, command.start, command.call_id, now_s)
        elif command.start < end:
            event = RangeRemoved(at_s=now_s, start=command.start, end=end, call_id=command.call_id)
            state = self._apply(state.session_id, event)
        return _head(state)

    def _cut(self, state: SessionState, num_tokens: int, call_id: str, now_s: float) -> SessionState:
        return self._apply(state.session_id, Truncated(at_s=now_s, num_tokens=num_tokens, call_id=call_id))

    def _list(self, command: ListSessions, now_s: float) -> SessionList:
        found = sorted(
            key
            for key, each in self._sessions.items()
            if key > command.after
            and command.namespace_id in (None, each.namespace_id)
            and command.model_id in (None, each.model_id)
            and not self._is_expired(each, now_s)
        )
        page = found[: command.limit]
        return SessionList(sessions=tuple(_head(self._sessions[key]) for key in page), has_more=len(found) > len(page))

    def _begin(self, command: BeginTurn, now_s: float) -> TurnStarted:
        state = self._find(command.session_id, now_s)
        if command.model_id != state.model_id:
            message = f"model: session {state.session_id!r} belongs to the model {state.model_id!r}."
            raise _Refuse("InvalidRequest", message, "model")
        if command.namespace_id not in (None, state.namespace_id):
            message = f"namespace: session {state.session_id!r} belongs to the namespace {state.namespace_id!r}."
            raise _Refuse("InvalidRequest", message, "namespace")
        turn = state.open_turn
        if turn is not None and turn.turn_id != command.turn_id and self._deadline_s[state.session_id] <= now_s:
            state = self._abort(state, "its writer was not heard of", now_s)
            turn = None
        if turn is None or turn.turn_id != command.turn_id:
            _require_idle(state)
            epoch = Epoch(state.epoch + EPOCHS_PER_TURN)
            state = self._apply(state.session_id, TurnBegun(at_s=now_s, turn_id=command.turn_id, epoch=epoch))
        self._deadline_s[state.session_id] = now_s + self._lease_s
        return TurnStarted(state=state, epoch=state.epoch)

    def _commit(self, command: CommitTurn, now_s: float) -> SessionHead:
        state = self._find(command.session_id, now_s)
        if state.last_turn_id == command.turn_id:
            return _head(state)
        turn = state.open_turn
        if turn is None or (turn.turn_id, turn.epoch) != (command.turn_id, command.epoch):
            message = f"session {state.session_id!r} has moved on to epoch {state.epoch}; this turn is not kept."
            raise _Refuse("Conflict", message, "session_id")
        event = Appended(
            at_s=now_s,
            turn_id=command.turn_id,
            epoch=command.epoch,
            kind=command.kind,
            prompt_bytes=command.prompt_bytes,
            output_bytes=command.output_bytes,
            messages_json=command.messages_json,
            finish_reason=command.finish_reason,
            owner=command.owner,
            context=command.context,
        )
        del self._deadline_s[state.session_id]
        return _head(self._apply(state.session_id, event))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _apply(self, session_id: SessionId, event: SessionEvent) -> SessionState:
        state = apply(self._sessions.get(session_id), event)
        self._sessions[session_id] = state
        self._records.append(Stored(session_id, state.version, event))
        return state

    def _abort(self, state: SessionState, reason: str, now_s: float) -> SessionState:
        assert state.open_turn is not None
        self._deadline_s.pop(state.session_id)
        return self._apply(state.session_id, TurnAborted(at_s=now_s, turn_id=state.open_turn.turn_id, reason=reason))

    def _remove(self, state: SessionState) -> None:
        del self._sessions[state.session_id]
        self._deadline_s.pop(state.session_id, None)
        # Above every attempt of the session's last turn.
        self.epoch_floor = Epoch(max(self.epoch_floor, state.epoch + EPOCHS_PER_TURN))
        self._records.append(Stored(state.session_id, 0, None))

    def _find(self, session_id: SessionId, now_s: float) -> SessionState:
        state = self._sessions.get(session_id)
        if state is not None and self._is_expired(state, now_s):
            self._remove(state)
            state = None
        if state is None:
            raise _Refuse("NotFound", f"The session {session_id!r} does not exist.", "session_id")
        return state

    def _existing(self, session_id: SessionId, call_id: str, now_s: float) -> SessionState | None:
        """The session, if this very call made it; refused if another did."""
        state = self._sessions.get(session_id)
        if state is not None and self._is_expired(state, now_s):
            self._remove(state)
            return None
        if state is not None and state.call_id != call_id:
            raise _Refuse("Conflict", f"id: the session {session_id!r} exists already.", "id")
        return state

    @staticmethod
    def _is_expired(state: SessionState, now_s: float) -> bool:
        idle = not state.pinned and state.open_turn is None
        return idle and state.ttl_s is not None and state.used_s + state.ttl_s <= now_s

    @staticmethod
    def _check_position(state: SessionState, num_tokens: int) -> None:
        if not 0 <= num_tokens <= state.num_tokens:
            message = f"num_tokens: {num_tokens} is not 0 to {state.num_tokens}."
            raise _Refuse("InvalidRequest", message, "num_tokens")

    def _make_room(
        self, namespace_id: NamespaceId, max_sessions: int, now_s: float, spare: SessionId | None = None
    ) -> None:
        """Removes the least recently used sessions that nobody pinned or writes, until one more fits."""
        own = [each for each in self._sessions.values() if each.namespace_id == namespace_id]
        surplus = len(own) + 1 - max_sessions
        if surplus <= 0:
            return
        idle = [each for each in own if not each.pinned and each.open_turn is None and each.session_id != spare]
        victims = sorted(idle, key=lambda each: (not self._is_expired(each, now_s), each.used_s, each.session_id))
        if len(victims) < surplus:
            message = f"namespace {namespace_id!r} holds {len(own)} sessions, all pinned or in use; delete some."
            raise _Refuse("OverQuota", message)
        for victim in victims[:surplus]:
            self._remove(victim)


def _require_idle(state: SessionState) -> None:
    if state.open_turn is not None:
        message = f"another request is writing session {state.session_id!r}; wait for it, or fork the session."
        raise _Refuse("Conflict", message, "session_id", busy=True)


def _require_version(state: SessionState, log: ModelLog) -> None:
    if log.version != state.version:
        raise _Refuse("Conflict", f"session {state.session_id!r} has changed meanwhile; try again.", "session_id")


def _head(state: SessionState, *, with_tokens: bool = False) -> SessionHead:
    shown = state if with_tokens else msgspec.structs.replace(state, token_bytes=b"", pending=())
    return SessionHead(state=shown, num_tokens=state.num_tokens)
