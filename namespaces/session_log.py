"""One session as a function of its events. The token log is the truth; KV is a cache of it.

    Created ──► TurnBegun ──► Appended        a turn ended by itself: its tokens are in the log
                    └───────► TurnAborted     a turn was given up: the log is as before
    Forked (instead of Created) · Truncated · RangeRemoved · Pinned · OwnerChanged

`apply(state, event) -> state` is total for events that `SessionBook` makes, and raises IntegrityError for any other: an
event that does not fit the state means a damaged store. The version of a session is the number of its events.

Epochs order writers. Every turn begins with a new epoch, EPOCHS_PER_TURN above the last: those between are for the
attempts of one turn at several replicas. Whoever has an older epoch can neither commit here nor compute at a pool.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from remora.namespaces.edits import ContextOutcome, ContextPolicy, Edits, truncated
from remora.namespaces.pending_removals import (
    TOKEN_BYTES,
    Pending,
    PendingRemoval,
    cut_pending,
    restored,
    without,
)
from remora.namespaces.session_turn import Turn, TurnKind, cut_turns, without_range
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, ReplicaId, SessionId

#: More than the attempts a router makes at one request, which count up from the turn's epoch.
EPOCHS_PER_TURN: Final = 1024
#: Edits of a session by which one that is said again is known: more than are made while a call is repeated.
MAX_EDIT_IDS: Final = 16


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Tokens as little-endian 32-bit numbers: a quarter of the size of Python's, and one object."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Inverse of pack_tokens."""
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


class ModelLog(msgspec.Struct, frozen=True, kw_only=True):
    """A session's log as another model reads it: what a move or a fork to that model brings along."""

    #: Of the session that it was made from.
    version: int
    model_id: ModelId
    namespace_id: NamespaceId
    token_bytes: bytes
    turns: tuple[Turn, ...]
    #: None unless KV of the old model is KV of the new one.
    edits: Edits = ()
    pending: Pending = ()

    def fields(self) -> dict[str, object]:
        """Those of a session's state that it replaces."""
        fields = msgspec.structs.asdict(self)
        del fields["version"]
        return fields


class OpenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The writer that has the session now."""

    turn_id: str
    epoch: Epoch
    begun_s: float


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable; a new one for every event."""

    session_id: SessionId
    model_id: ModelId
    namespace_id: NamespaceId
    tenant: str
    #: Seconds without use after which the session goes; None: never.
    ttl_s: float | None
    priority: int
    #: A turn is on disk before its end reaches the client.
    durable: bool
    pinned: bool = False
    parent_id: SessionId | None = None
    created_s: float
    used_s: float
    version: int = 1
    epoch: Epoch
    #: The replica that computed the last turn, or should compute the next.
    owner: ReplicaId | None = None
    token_bytes: bytes = b""
    turns: tuple[Turn, ...] = ()
    #: Of the log before the pending removals.
    edits: Edits = ()
    pending: Pending = ()
    context: ContextPolicy = ContextPolicy()
    open_turn: OpenTurn | None = None
    #: Of the event that made the session, and of the last commit: a call that is said again is known by it.
    call_id: str
    last_turn_id: str = ""
    #: Of the last edits of the log, newest last: neither is one of these made twice.
    edit_ids: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def ends_in_prompt(self) -> bool:
        """Whether a truncation left a prompt without its answer, or a part of a prompt."""
        return bool(self.turns) and self.turns[-1].end <= self.turns[-1].prompt_end

    @property
    def computed_bytes(self) -> bytes:
        """The packed log that the last turn was computed on: pending removals have not happened to its KV."""
        return restored(self.token_bytes, self.pending)


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    at_s: float


class Created(_Event, frozen=True, kw_only=True, tag=True):
    session_id: SessionId
    model_id: ModelId
    namespace_id: NamespaceId
    tenant: str
    ttl_s: float | None
    priority: int
    durable: bool
    #: Above that of any session of this name before.
    epoch: Epoch
    call_id: str
    context: ContextPolicy = ContextPolicy()


class Forked(_Event, frozen=True, kw_only=True, tag=True):
    """A new session with a copy of another's log up to a point. Complete in itself: the parent may go."""

    created: Created
    parent_id: SessionId
    token_bytes: bytes
    turns: tuple[Turn, ...]
    edits: Edits
    pending: Pending = ()
    #: Where the parent's blocks are.
    owner: ReplicaId | None = None


class TurnBegun(_Event, frozen=True, kw_only=True, tag=True):
    turn_id: str
    epoch: Epoch


class TurnAborted(_Event, frozen=True, kw_only=True, tag=True):
    turn_id: str
    reason: str


class Appended(_Event, frozen=True, kw_only=True, tag=True):
    """The open turn's prompt and answer, and what left the context: first the pending removals, then what rolled."""

    turn_id: str
    epoch: Epoch
    kind: TurnKind
    prompt_bytes: bytes
    output_bytes: bytes
    messages_json: bytes
    finish_reason: str
    owner: ReplicaId | None
    context: ContextOutcome | None = None


class Truncated(_Event, frozen=True, kw_only=True, tag=True):
    num_tokens: int
    call_id: str = ""


class RangeRemoved(_Event, frozen=True, kw_only=True, tag=True):
    """Tokens [start, end) left the middle; the KV of those behind them is kept."""

    start: int
    end: int
    call_id: str = ""


class Pinned(_Event, frozen=True, kw_only=True, tag=True):
    pinned: bool


class OwnerChanged(_Event, frozen=True, kw_only=True, tag=True):
    """Compare-and-set: from exactly `old_epoch` to a higher one."""

    old_epoch: Epoch
    epoch: Epoch
    owner: ReplicaId


class ModelChanged(_Event, frozen=True, kw_only=True, tag=True):
    """The session goes on with another model: epochs as in OwnerChanged."""

    old_epoch: Epoch
    epoch: Epoch
    owner: ReplicaId
    log: ModelLog


SessionEvent = (
    Created
    | Forked
    | TurnBegun
    | TurnAborted
    | Appended
    | Truncated
    | RangeRemoved
    | Pinned
    | OwnerChanged
    | ModelChanged
)


def apply(state: SessionState | None, event: SessionEvent) -> SessionState:
    """The state after the event. Raises IntegrityError for an event that does not follow from the state."""
    if isinstance(event, Created):
        _require(state is None, event)
        return _created(event)
    if isinstance(event, Forked):
        _require(state is None, event)
        return msgspec.structs.replace(
            _created(event.created),
            parent_id=event.parent_id,
            token_bytes=event.token_bytes,
            turns=event.turns,
            edits=event.edits,
            pending=event.pending,
            owner=event.owner,
        )
    if state is None:
        raise IntegrityError(f"{type(event).__name__} comes before the session's creation")
    changes = _changes(state, event)
    return msgspec.structs.replace(state, version=state.version + 1, **changes)


def _created(event: Created) -> SessionState:
    return SessionState(
        session_id=event.session_id,
        model_id=event.model_id,
        namespace_id=event.namespace_id,
        tenant=event.tenant,
        ttl_s=event.ttl_s,
        priority=event.priority,
        durable=event.durable,
        created_s=event.at_s,
        used_s=event.at_s,
        epoch=event.epoch,
        call_id=event.call_id,
        context=event.context,
    )


def _changes(
    state: SessionState,
    event: TurnBegun | TurnAborted | Appended | Truncated | RangeRemoved | Pinned | OwnerChanged | ModelChanged,
) -> dict[str, object]:
    turn = state.open_turn
    match event:
        case TurnBegun(turn_id=turn_id, epoch=epoch, at_s=at_s):
            _require(turn is None and epoch >= state.epoch + EPOCHS_PER_TURN, event)
            return {
                "open_turn": OpenTurn(turn_id=turn_id, epoch=epoch, begun_s=at_s),
                "epoch": epoch,
                "used_s": max(state.used_s, at_s),
            }
        case TurnAborted(turn_id=turn_id):
            _require(turn is not None and turn.turn_id == turn_id, event)
            return {"open_turn": None}
        case Appended():
            _require(turn is not None and (turn.turn_id, turn.epoch) == (event.turn_id, event.epoch), event)
            removed = event.context.removed if event.context is not None else ()
            _require(removed[: len(state.pending)] == tuple((each.start, each.end) for each in state.pending), event)
            return _appended(state, event, removed[len(state.pending) :])
        case Truncated(num_tokens=num_tokens):
            _require(turn is None and 0 <= num_tokens <= state.num_tokens, event)
            return {**cut_log(state, num_tokens), **_edited(state, event)}
        case RangeRemoved(start=start, end=end):
            _require(turn is None and 0 <= start < end <= state.num_tokens, event)
            gone = state.token_bytes[start * TOKEN_BYTES : end * TOKEN_BYTES]
            return {
                "token_bytes": without(state.token_bytes, start, end),
                "turns": tuple(without_range(each, start, end) for each in state.turns),
                "pending": (*state.pending, PendingRemoval(start=start, token_bytes=gone)),
                **_edited(state, event),
            }
        case Pinned(pinned=pinned):
            return {"pinned": pinned}
        case OwnerChanged(old_epoch=old_epoch, epoch=epoch, owner=owner):
            _require(old_epoch == state.epoch < epoch, event)
            return {
                "epoch": epoch,
                "owner": owner,
                "open_turn": turn and msgspec.structs.replace(turn, epoch=epoch),
            }
        case ModelChanged(old_epoch=old_epoch, epoch=epoch, owner=owner, log=log):
            _require(turn is None and old_epoch == state.epoch < epoch and log.version == state.version, event)
            return {**log.fields(), "epoch": epoch, "owner": owner}


def _appended(state: SessionState, event: Appended, rolled: tuple[tuple[int, int], ...]) -> dict[str, object]:
    start = state.num_tokens
    prompt_end = start + len(event.prompt_bytes) // TOKEN_BYTES
    turn = Turn(
        kind=event.kind,
        start=start,
        prompt_end=prompt_end,
        end=prompt_end + len(event.output_bytes) // TOKEN_BYTES,
        messages_json=event.messages_json,
        finish_reason=event.finish_reason,
    )
    token_bytes, turns = state.token_bytes + event.prompt_bytes + event.output_bytes, (*state.turns, turn)
    for first, last in rolled:
        token_bytes = without(token_bytes, first, last)
        turns = tuple(without_range(each, first, last) for each in turns)
    return {
        "token_bytes": token_bytes,
        "turns": turns,
        "edits": event.context.edits if event.context is not None else state.edits,
        "pending": (),
        "open_turn": None,
        "owner": event.owner or state.owner,
        "last_turn_id": event.turn_id,
        "used_s": max(state.used_s, event.at_s),
    }


def _edited(state: SessionState, event: Truncated | RangeRemoved) -> dict[str, object]:
    edit_ids = (*state.edit_ids, event.call_id) if event.call_id else state.edit_ids
    return {"edit_ids": edit_ids[-MAX_EDIT_IDS:], "used_s": max(state.used_s, event.at_s)}


def cut_log(state: SessionState, num_tokens: int) -> dict[str, object]:
    """Fields of the first `num_tokens` tokens: the log, its turns, and what its KV depends on."""
    pending, num_computed = cut_pending(state.pending, num_tokens)
    return {
        "token_bytes": state.token_bytes[: num_tokens * TOKEN_BYTES],
        "turns": cut_turns(state.turns, num_tokens),
        "edits": truncated(state.edits, num_computed),
        "pending": pending,
    }


def _require(condition: bool, event: SessionEvent) -> None:
    if not condition:
        raise IntegrityError(f"{type(event).__name__} does not follow from the session's state: {event}"[:500])


def check_state(state: SessionState) -> None:
    """Raises IntegrityError when the turns do not tile the log, or the writer's epoch is not the session's."""
    position = 0
    for turn in state.turns:
        if not turn.start == position <= turn.prompt_end <= turn.end:
            raise IntegrityError(f"session {state.session_id}: a turn starts at {turn.start}, not at {position}")
        position = turn.end
    if position != state.num_tokens or len(state.token_bytes) % TOKEN_BYTES:
        raise IntegrityError(f"session {state.session_id}: turns end at {position} of {state.num_tokens} tokens")
    if state.open_turn is not None and state.open_turn.epoch != state.epoch:
        raise IntegrityError(f"session {state.session_id}: its open turn has another epoch")
