"""The events by which a log goes on elsewhere: as a new session, or with another model."""

from __future__ import annotations

from remora.namespaces.session_commands import ForkSession, MoveSession
from remora.namespaces.session_log import (
    Created,
    Forked,
    ModelChanged,
    ModelLog,
    OwnerChanged,
    SessionState,
    cut_log,
)
from remora.platform.base.ids import Epoch


def forked(parent: SessionState, command: ForkSession, num_tokens: int, *, epoch: Epoch, at_s: float) -> Forked:
    """A new session with the first tokens of its parent, or with what another model makes of them."""
    log = command.log or ModelLog(
        version=parent.version,
        model_id=parent.model_id,
        namespace_id=parent.namespace_id,
        **cut_log(parent, num_tokens),  # type: ignore[arg-type]
    )
    created = Created(
        at_s=at_s,
        session_id=command.new_id,
        model_id=log.model_id,
        namespace_id=log.namespace_id,
        tenant=parent.tenant,
        ttl_s=parent.ttl_s,
        priority=parent.priority,
        durable=parent.durable,
        epoch=epoch,
        call_id=command.call_id,
        context=parent.context,
    )
    return Forked(
        at_s=at_s,
        created=created,
        parent_id=parent.session_id,
        token_bytes=log.token_bytes,
        turns=log.turns,
        edits=log.edits,
        pending=log.pending,
        owner=parent.owner if command.log is None else command.owner,
    )


def moved(state: SessionState, command: MoveSession, *, at_s: float) -> OwnerChanged | ModelChanged | None:
    """None: it is there already, as when a move is said again."""
    log = command.log
    is_there = state.owner == command.owner
    if log is not None and is_there:
        is_same = all(getattr(state, name) == value for name, value in log.fields().items())
        is_there = is_same and state.version == log.version + 1
    if is_there:
        return None
    epochs = {"old_epoch": state.epoch, "epoch": Epoch(state.epoch + 1)}
    if log is None:
        return OwnerChanged(at_s=at_s, owner=command.owner, **epochs)
    return ModelChanged(at_s=at_s, owner=command.owner, log=log, **epochs)
