"""/v1/sessions: made, listed, looked at, forked, cut, pinned, deleted."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from remora.cache_actors.session_client import ask
from remora.namespaces.edits import chain_edits
from remora.namespaces.hashing import chain_hashes
from remora.namespaces.session_commands import (
    CreateSession,
    DeleteSession,
    Done,
    ForkSession,
    ListSessions,
    PinSession,
    RemoveTokens,
    SessionHead,
    SessionList,
    ShowSession,
    TruncateSession,
)
from remora.namespaces.session_log import SessionState, unpack_tokens
from remora.namespaces.session_turn import Turn
from remora.platform.base.errors import InvalidRequest
from remora.platform.base.ids import ModelId, NamespaceId, SessionId
from remora.platform.http.body import read_model
from remora.platform.http.branch_answers import fork_branches
from remora.platform.http.branch_request import ForkBody
from remora.platform.http.caller import Caller, caller_of
from remora.platform.http.generation import NAMESPACE_HEADER
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.openapi import json_body
from remora.platform.http.services import Services
from remora.platform.http.session_models import fork_to_model, transfer_document
from remora.platform.http.session_requests import (
    CreateBody,
    EmptyBody,
    TruncateBody,
    context_policy,
    new_session_id,
    read_list_query,
    read_show_query,
)


def session_routes(services: Services) -> APIRouter:
    router = APIRouter()
    port = services.turns.port
    catalog = services.core.catalog
    max_bytes = services.config.http.max_body_bytes

    async def head(command: Any) -> Response:
        return MsgspecJSONResponse(_document(await ask(port, command, SessionHead)))

    async def show(session_id: str) -> SessionHead:
        return await ask(port, ShowSession(session_id=SessionId(session_id)), SessionHead)

    @router.post("/v1/sessions", openapi_extra=json_body(CreateBody))
    async def create_session(request: Request) -> Response:
        """A new, empty session."""
        body = await read_model(request, CreateBody, max_bytes)
        caller = caller_of(request)
        caller.check_priority(body.priority)
        model_id = caller.find_model(catalog, body.model)
        name = request.headers.get(NAMESPACE_HEADER) or body.namespace
        namespace = catalog.namespaces[caller.find_namespace(catalog, model_id, name)]
        return await head(
            CreateSession(
                session_id=SessionId(body.id or new_session_id()),
                model_id=model_id,
                namespace_id=NamespaceId(namespace.name),
                call_id=uuid.uuid4().hex,
                tenant=namespace.tenant,
                ttl_s=body.ttl_s,
                priority=body.priority,
                durable=body.durable,
                max_sessions=namespace.max_sessions,
                context=context_policy(body, namespace),
            )
        )

    @router.get("/v1/sessions")
    async def list_sessions(request: Request) -> Response:
        """A page of the sessions, by id."""
        query = read_list_query(request)
        pages = [
            await ask(
                port,
                ListSessions(
                    namespace_id=namespace_id,
                    model_id=ModelId(query.model) if query.model else None,
                    after=query.after,
                    limit=query.limit,
                ),
                SessionList,
            )
            for namespace_id in _listed_namespaces(caller_of(request), query.namespace)
        ]
        found = sorted((each for page in pages for each in page.sessions), key=lambda each: each.state.session_id)
        has_more = len(found) > query.limit or any(page.has_more for page in pages)
        return MsgspecJSONResponse(
            {"object": "list", "data": [_document(each) for each in found[: query.limit]], "has_more": has_more}
        )

    @router.get("/v1/sessions/{session_id}")
    async def show_session(request: Request, session_id: str) -> Response:
        """A session with its turns; with `include_tokens=true` also the token log."""
        query = read_show_query(request)
        found = await ask(port, ShowSession(session_id=SessionId(session_id), with_tokens=True), SessionHead)
        token_ids = unpack_tokens(found.state.token_bytes)
        tokenizer = await services.tokenizers.get(catalog.find_model(found.state.model_id))
        turns = [
            _turn_document(turn, tokenizer.decode(token_ids[turn.prompt_end : turn.end])) for turn in found.state.turns
        ]
        more = {"token_ids": token_ids} if query.include_tokens else {}
        blocks = await _blocks(services, found.state)
        return MsgspecJSONResponse({**_document(found), "blocks": blocks, "turns": turns, **more})

    @router.delete("/v1/sessions/{session_id}")
    async def delete_session(session_id: str) -> Response:
        """Forgets a session. A turn that is under way is not kept."""
        await ask(port, DeleteSession(session_id=SessionId(session_id)), Done)
        return MsgspecJSONResponse({"id": session_id, "object": "session", "deleted": True})

    @router.post("/v1/sessions/{session_id}/fork", openapi_extra=json_body(ForkBody))
    async def fork_session(request: Request, session_id: str) -> Response:
        """A new session that starts with this one's log, or the first tokens of it; or branches that generate at
        once, each a session of its own, in one answer."""
        body = await read_model(request, ForkBody, max_bytes)
        if body.branches is not None:
            return await fork_branches(services, request, SessionId(session_id), body)
        if body.other_model is not None:
            made, moved = await fork_to_model(services, caller_of(request), SessionId(session_id), body)
            return MsgspecJSONResponse({**_document(made), "transfer": transfer_document(moved)})
        parent = (await show(session_id)).state
        namespace_id = catalog.find_namespace(catalog.find_model(parent.model_id), parent.namespace_id)
        return await head(
            ForkSession(
                session_id=SessionId(session_id),
                new_id=SessionId(body.id or new_session_id()),
                call_id=uuid.uuid4().hex,
                num_tokens=body.num_tokens,
                max_sessions=catalog.namespaces[namespace_id].max_sessions,
            )
        )

    @router.post("/v1/sessions/{session_id}/truncate", openapi_extra=json_body(TruncateBody))
    async def truncate_session(request: Request, session_id: str) -> Response:
        """Keeps the first tokens or turns of the log, or takes a range of tokens out of its middle."""
        body = await read_model(request, TruncateBody, max_bytes)
        if body.remove is not None:
            if body.num_tokens is not None or body.num_turns is not None:
                raise InvalidRequest("remove: give it alone, or num_tokens, or num_turns.", field="remove")
            return await head(
                RemoveTokens(
                    session_id=SessionId(session_id),
                    call_id=uuid.uuid4().hex,
                    start=body.remove.start,
                    end=body.remove.end,
                )
            )
        return await head(
            TruncateSession(
                session_id=SessionId(session_id),
                call_id=uuid.uuid4().hex,
                num_tokens=body.num_tokens,
                num_turns=body.num_turns,
            )
        )

    @router.post("/v1/sessions/{session_id}/pin", openapi_extra=json_body(EmptyBody))
    async def pin_session(request: Request, session_id: str) -> Response:
        """Neither a full namespace nor its TTL removes a pinned session."""
        await read_model(request, EmptyBody, max_bytes)
        return await head(PinSession(session_id=SessionId(session_id), pinned=True))

    @router.post("/v1/sessions/{session_id}/unpin", openapi_extra=json_body(EmptyBody))
    async def unpin_session(request: Request, session_id: str) -> Response:
        """The session may go again."""
        await read_model(request, EmptyBody, max_bytes)
        return await head(PinSession(session_id=SessionId(session_id), pinned=False))

    return router


def _listed_namespaces(caller: Caller, wanted: str | None) -> list[NamespaceId | None]:
    """What to ask the registry for, one call each; None: all at once."""
    if wanted is not None:
        return [NamespaceId(wanted)] if caller.sees(wanted) else []
    return [None] if caller.namespaces is None else [*sorted(caller.namespaces)]


async def _blocks(services: Services, state: SessionState) -> dict[str, Any] | None:
    """Full blocks of the log, and how many of the first of them each pool has in its device's memory; None while no
    replica has said how long a block is."""
    card = services.core.fleet.known_card(state.model_id)
    if card is None:
        return None
    fingerprint = card.of(state.namespace_id).fingerprint
    root = services.core.catalog.chain_root(state.namespace_id, fingerprint)
    token_ids = unpack_tokens(state.computed_bytes)
    hashes = chain_hashes(root, token_ids, card.block_tokens, chain_edits(state.edits))
    found = await services.pools.find_blocks(state.namespace_id, fingerprint, hashes)
    return {"full": len(hashes), "block_tokens": card.block_tokens, "device": found}


def _document(head: SessionHead) -> dict[str, Any]:
    state = head.state
    return {
        "id": state.session_id,
        "object": "session",
        "model": state.model_id,
        "namespace": state.namespace_id,
        "parent": state.parent_id,
        "created": int(state.created_s),
        "last_used": int(state.used_s),
        "age_s": round(max(0.0, time.time() - state.created_s), 3),
        "ttl_s": state.ttl_s,
        "priority": state.priority,
        "durable": state.durable,
        "pinned": state.pinned,
        "context_overflow": state.context.overflow,
        "keep_tokens": state.context.keep_tokens,
        "cache_limit": state.context.cache_limit_bytes,
        "edits": [{"position": edit.position, "kind": edit.kind} for edit in state.edits],
        "num_tokens": head.num_tokens,
        "num_turns": len(state.turns),
        "version": state.version,
        "epoch": state.epoch,
        "owner": state.owner,
        "busy": state.open_turn is not None,
    }


def _turn_document(turn: Turn, answer: str) -> dict[str, Any]:
    return {
        "kind": turn.kind,
        "start": turn.start,
        "prompt_end": turn.prompt_end,
        "end": turn.end,
        "messages": msgspec.json.decode(turn.messages_json),
        "answer": answer,
        "finish_reason": turn.finish_reason,
    }
