"""Sessions that go on with another model: what the other model makes of the log, and how its KV gets there.

equal tokenizers     the tokens as they are        equal fingerprints              KV shared or copied
different ones       each turn anew, from its text  compatible, another precision   KV taken over (take_over.py)
                                                   else                            the tokens are computed there
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

import msgspec

from remora.cache_actors.session_client import ask
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.deployments.moves import Moved, precopy_job
from remora.deployments.session_context import SessionContext
from remora.deployments.token_counts import TokenCounts
from remora.namespaces.session_commands import ForkSession, MoveSession, SessionHead, ShowSession
from remora.namespaces.session_log import ModelLog, SessionState, pack_tokens, unpack_tokens
from remora.namespaces.session_turn import Turn
from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import Conflict, InvalidRequest
from remora.platform.base.ids import ModelId, NamespaceId, RequestId, SessionId
from remora.platform.base.telemetry import inject, span
from remora.platform.http.branch_request import ForkBody, cut_parent
from remora.platform.http.caller import Caller
from remora.platform.http.services import Services, encode
from remora.platform.http.session_prompt import rendered_behind
from remora.platform.http.session_requests import new_session_id
from remora.platform.http.take_over import choose_landing


async def log_for(services: Services, state: SessionState, model_id: ModelId, namespace_id: NamespaceId) -> ModelLog:
    """The session's log as the other model reads it. `state` must have its tokens.

    Raises InvalidRequest for a namespace of another tenant, and for turns that the model cannot take.
    """
    if services.core.catalog.namespaces[namespace_id].tenant != state.tenant:
        raise InvalidRequest(f"model: namespace {namespace_id!r} belongs to another tenant.", field="model")
    source = await services.tokenizers.get(services.core.catalog.find_model(state.model_id))
    target = await services.tokenizers.get(model_id)
    log = ModelLog(
        version=state.version,
        model_id=model_id,
        namespace_id=namespace_id,
        token_bytes=state.token_bytes,
        turns=state.turns,
    )
    if source.tokenizer_id != target.tokenizer_id:
        token_ids, turns = await retokenised(source, target, unpack_tokens(state.token_bytes), state.turns)
        return msgspec.structs.replace(log, token_bytes=pack_tokens(token_ids), turns=turns)
    if await _has_equal_kv(services, state, log):
        return msgspec.structs.replace(log, edits=state.edits, pending=state.pending)
    return log


async def _has_equal_kv(services: Services, state: SessionState, log: ModelLog) -> bool:
    """Whether KV that the session's model computed is what the other one would compute."""
    old, new = services.core.fleet.known_card(state.model_id), await services.core.fleet.card(log.model_id)
    return old is not None and old.of(state.namespace_id).fingerprint == new.of(log.namespace_id).fingerprint


async def retokenised(
    source: ChatTokenizer, target: ChatTokenizer, token_ids: Sequence[int], turns: Sequence[Turn]
) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
    """The same turns in the target's tokens.

    A chat turn that is still as the source's template rendered it is rendered by the target's; any other, and every
    answer, is taken as its text, without the source's special tokens. Raises InvalidRequest for messages that the
    target's template does not take.
    """
    log: list[int] = []
    found: list[Turn] = []
    for turn in turns:
        start, before = len(log), token_ids[: turn.start]
        prompt = tuple(token_ids[turn.start : turn.prompt_end])
        messages = msgspec.json.decode(turn.messages_json)
        if turn.kind == "chat" and target.has_chat_template and await _is_rendered(source, messages, before, prompt):
            log += await _rendered_anew(target, messages, log)
        else:
            log += await encode(target, source.decode(prompt), add_special_tokens=not log, field="model")
        prompt_end = len(log)
        answer = source.decode(token_ids[turn.prompt_end : turn.end])
        log += await encode(target, answer, add_special_tokens=False, field="model")
        found.append(msgspec.structs.replace(turn, start=start, prompt_end=prompt_end, end=len(log)))
    return tuple(log), tuple(found)


async def _is_rendered(
    tokenizer: ChatTokenizer, messages: list[dict[str, object]], log: Sequence[int], prompt: tuple[int, ...]
) -> bool:
    """Whether the prompt is what a chat request with these messages puts behind the log."""
    try:
        return await rendered_behind(tokenizer, messages, log) == prompt
    except InvalidRequest:
        return False


async def _rendered_anew(
    tokenizer: ChatTokenizer, messages: list[dict[str, object]], log: Sequence[int]
) -> tuple[int, ...]:
    """The messages under the other model's template. Raises InvalidRequest naming `model` if it does not take them."""
    try:
        return await rendered_behind(tokenizer, messages, log)
    except InvalidRequest as error:
        message = f"model: its chat template does not take the session's messages: {error}"
        raise InvalidRequest(message, field="model") from error


async def bring(
    services: Services, state: SessionState, log: ModelLog, trace_context: Mapping[str, str] | None = None
) -> tuple[Moved, ModelLog]:
    """Lets the other model have the KV of the log, from wherever it is, before the session goes there. The log comes
    back with what its KV is there.

    Raises ContextLengthExceeded when the log does not fit the model, Unavailable when no replica of it takes it.
    """
    core, started_s = services.core, time.monotonic()
    await core.waker.ready(log.model_id)
    card = await core.fleet.card(log.model_id)
    state_there = as_state(state, log)
    context = SessionContext(card, state_there)
    token_ids = context.engine_tokens(unpack_tokens(log.token_bytes))
    context.check(state_there.num_tokens, 1, field="model")
    attributes: dict[str, str | int] = {
        names.REMORA_SESSION_ID: state.session_id,
        names.REMORA_NAMESPACE: log.namespace_id,
        names.GEN_AI_REQUEST_MODEL: log.model_id,
    }
    with span(names.MIGRATE_PRECOPY, attributes, parent=trace_context) as precopy:
        landing = await choose_landing(services, state, log, token_ids, card)
        log = msgspec.structs.replace(log, edits=landing.edits)
        precopy.set_attribute(names.REMORA_REPLICA_ID, landing.replica)
        tokens = TokenCounts()
        if token_ids:
            tokens, outcome = await core.moves.precopy(
                precopy_job(
                    RequestId(f"move-{uuid.uuid4().hex}"),
                    log.model_id,
                    log.namespace_id,
                    token_ids,
                    landing.replica,
                    owner=state.owner,
                    context=SessionContext(card, as_state(state, log)).plan,
                    # Nothing else is looked for then: what is found would be named in two ways at once.
                    num_kept_tokens=None if landing.source is None else 0,
                    kv_source=landing.source,
                    trace_context=inject(),
                )
            )
            if landing.source is not None and outcome is not None and not outcome.removed:
                log = msgspec.structs.replace(log, edits=outcome.edits)
        kv_of = None if landing.source is None else state.model_id
        ranges = tokens.ranges(kv_of=kv_of, own_end=landing.start)
        precopy.set_attributes(tokens.attributes())
        precopy.set_attribute(names.REMORA_MIGRATE_RANGES, [str(each) for each in ranges])
    moved = Moved(
        source=state.owner,
        replica=landing.replica,
        tokens=tokens,
        ranges=ranges,
        pause_s=0.0,
        took_s=time.monotonic() - started_s,
    )
    return moved, log


def as_state(state: SessionState, log: ModelLog) -> SessionState:
    """The session as the log's model has it."""
    return msgspec.structs.replace(state, **log.fields())


async def fork_to_model(
    services: Services, caller: Caller, session_id: SessionId, body: ForkBody
) -> tuple[SessionHead, Moved]:
    """A new session with the log of another, or the first tokens of it, as another model reads it."""
    port, catalog = services.turns.port, services.core.catalog
    model_id = caller.find_model(catalog, body.other_model or "")
    namespace_id = caller.find_namespace(catalog, model_id, body.other_namespace)
    state = (await ask(port, ShowSession(session_id=session_id, with_tokens=True), SessionHead)).state
    state = cut_parent(state, body.num_tokens)
    log = await log_for(services, state, model_id, namespace_id)
    brought, log = await bring(services, state, log)
    command = ForkSession(
        session_id=session_id,
        new_id=SessionId(body.id or new_session_id()),
        call_id=uuid.uuid4().hex,
        num_tokens=body.num_tokens,
        max_sessions=catalog.namespaces[namespace_id].max_sessions,
        log=log,
        owner=brought.replica,
    )
    return await ask(port, command, SessionHead), brought


async def move_to_model(
    services: Services, caller: Caller, state: SessionState, model: str, namespace: str | None
) -> Moved:
    """The session goes on with another model. `state` must have its tokens; refused while a turn is under way."""
    catalog = services.core.catalog
    model_id = caller.find_model(catalog, model)
    namespace_id = caller.find_namespace(catalog, model_id, namespace)
    if state.open_turn is not None:
        message = (
            "The session's turn is not over, and what is being generated stays with its model. Ask again when it is "
            f"over, or fork the session to {model!r} now: the fork has what is committed."
        )
        raise Conflict(message, field="session_id")
    if (model_id, namespace_id) == (state.model_id, state.namespace_id):
        raise InvalidRequest(f"to: the session is with {model!r} in {namespace_id!r} already.", field="to")
    log = await log_for(services, state, model_id, namespace_id)
    brought, log = await bring(services, state, log)
    command = MoveSession(
        session_id=state.session_id,
        owner=brought.replica,
        log=log,
        max_sessions=catalog.namespaces[namespace_id].max_sessions,
    )
    await ask(services.turns.port, command, SessionHead)
    return brought


def transfer_document(moved: Moved) -> dict[str, object]:
    """How the tokens got to where the session is now."""
    return {
        "from": moved.source,
        "to": moved.replica,
        "tokens": msgspec.structs.asdict(moved.tokens),
        "ranges": [each.document() for each in moved.ranges],
        "took_s": round(moved.took_s, 6),
    }
