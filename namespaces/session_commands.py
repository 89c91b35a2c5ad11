"""The protocol between routers and the session registry: commands in, one answer each.

    CreateSession · ForkSession · TruncateSession · RemoveTokens ─► SessionHead
    PinSession · MoveSession · ShowSession ─► SessionHead
    ListSessions ─► SessionList        DeleteSession · RenewTurns · AbortTurn  ─► Done
    BeginTurn ─► TurnStarted           CommitTurn ─► SessionHead               any ─► SessionRefused

A command may be sent again when its answer was lost: `call_id` and `turn_id` make the second one the same as the first.
"""

from __future__ import annotations

import msgspec

from remora.namespaces.edits import ContextOutcome, ContextPolicy
from remora.namespaces.session_log import ModelLog, SessionState
from remora.namespaces.session_turn import TurnKind
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, ReplicaId, SessionId


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class CreateSession(_Command, frozen=True, kw_only=True, tag=True):
    session_id: SessionId
    model_id: ModelId
    namespace_id: NamespaceId
    call_id: str
    tenant: str = ""
    ttl_s: float | None = None
    priority: int = 0
    durable: bool = True
    #: Of the namespace; the least recently used unpinned one makes room.
    max_sessions: int
    context: ContextPolicy = ContextPolicy()


class ForkSession(_Command, frozen=True, kw_only=True, tag=True):
    """A new session with the first `num_tokens` tokens (None: all) of another's committed log."""

    session_id: SessionId
    new_id: SessionId
    call_id: str
    num_tokens: int | None = None
    max_sessions: int
    #: For another model: the log that the new session starts with in place of those tokens, and where it is.
    log: ModelLog | None = None
    owner: ReplicaId | None = None


class TruncateSession(_Command, frozen=True, kw_only=True, tag=True):
    """Keeps the first `num_tokens` tokens, or the first `num_turns` turns: exactly one of the two."""

    session_id: SessionId
    call_id: str
    num_tokens: int | None = None
    num_turns: int | None = None


class RemoveTokens(_Command, frozen=True, kw_only=True, tag=True):
    """Takes the tokens [start, end) out of the log; end None: to its end."""

    session_id: SessionId
    call_id: str
    start: int
    end: int | None = None


class PinSession(_Command, frozen=True, kw_only=True, tag=True):
    session_id: SessionId
    pinned: bool


class MoveSession(_Command, frozen=True, kw_only=True, tag=True):
    """The replica that the next turn should go to. Refused while a turn is under way: its router moves that."""

    session_id: SessionId
    owner: ReplicaId
    #: To another model: the log there, and how many sessions its namespace may have.
    log: ModelLog | None = None
    max_sessions: int = 1


class DeleteSession(_Command, frozen=True, kw_only=True, tag=True):
    session_id: SessionId


class ShowSession(_Command, frozen=True, kw_only=True, tag=True):
    session_id: SessionId
    with_tokens: bool = False


class ListSessions(_Command, frozen=True, kw_only=True, tag=True):
    """By id, those after `after`."""

    namespace_id: NamespaceId | None = None
    model_id: ModelId | None = None
    after: str = ""
    limit: int = 100


class BeginTurn(_Command, frozen=True, kw_only=True, tag=True):
    """Takes the session for one writer. Its lease lasts LEASE_S and is renewed by RenewTurns."""

    session_id: SessionId
    turn_id: str
    model_id: ModelId
    #: None: whichever the session has.
    namespace_id: NamespaceId | None = None
    #: How long to wait for another writer; 0: refused at once.
    wait_s: float = 0.0


class CommitTurn(_Command, frozen=True, kw_only=True, tag=True):
    session_id: SessionId
    turn_id: str
    epoch: Epoch
    kind: TurnKind
    #: Packed tokens behind the log: what the turn added to the prompt, and what was generated and sent.
    prompt_bytes: bytes
    output_bytes: bytes
    messages_json: bytes = b"[]"
    finish_reason: str = ""
    owner: ReplicaId | None = None
    #: What left the context, if anything did.
    context: ContextOutcome | None = None


class AbortTurn(_Command, frozen=True, kw_only=True, tag=True):
    """The turn leaves no trace in the log. Unknown turns are ignored."""

    session_id: SessionId
    turn_id: str
    reason: str = ""


class RenewTurns(_Command, frozen=True, kw_only=True, tag=True):
    """Each is (session id, turn id)."""

    turns: tuple[tuple[SessionId, str], ...]


SessionCommand = (
    CreateSession
    | ForkSession
    | TruncateSession
    | RemoveTokens
    | PinSession
    | MoveSession
    | DeleteSession
    | ShowSession
    | ListSessions
    | BeginTurn
    | CommitTurn
    | AbortTurn
    | RenewTurns
)


class SessionHead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A session; `state.token_bytes` is empty unless asked for, and `num_tokens` says how long the log is."""

    state: SessionState
    num_tokens: int


class SessionList(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    sessions: tuple[SessionHead, ...]
    has_more: bool


class TurnStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The session with its whole log, as it stays until the turn ends."""

    state: SessionState
    epoch: Epoch


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class SessionRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing was changed. `error` is a class of the error tree."""

    error: str
    message: str
    field: str | None = None
    #: Another writer has the session; a wait can help.
    busy: bool = False


SessionAnswer = SessionHead | SessionList | TurnStarted | Done | SessionRefused
