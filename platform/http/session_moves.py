"""Sessions and requests that are to be elsewhere: migrate a session, drain a replica."""

from __future__ import annotations

import time
import uuid
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from remora.cache_actors.session_client import ask
from remora.deployments.moves import Moved, precopy_job
from remora.deployments.placement import least_loaded
from remora.deployments.router import RouterCore
from remora.deployments.session_context import SessionContext
from remora.deployments.token_counts import TokenCounts
from remora.namespaces.session_commands import MoveSession, SessionHead, ShowSession
from remora.namespaces.session_log import SessionState, unpack_tokens
from remora.platform.base.errors import Conflict, InvalidRequest, NotFound
from remora.platform.base.ids import ModelId, ReplicaId, RequestId, SessionId
from remora.platform.http.body import read_model
from remora.platform.http.caller import caller_of
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.openapi import json_body
from remora.platform.http.services import Services
from remora.platform.http.session_models import move_to_model, transfer_document
from remora.platform.http.session_requests import EmptyBody


class Destination(BaseModel):
    """One of the first four. A pool or node stands for the least loaded replica of the model there."""

    model_config = ConfigDict(extra="forbid")

    replica: Annotated[str, Field(min_length=1)] | None = None
    pool: Annotated[str, Field(min_length=1)] | None = None
    node: Annotated[str, Field(min_length=1)] | None = None
    model: Annotated[str, Field(min_length=1)] | None = None
    #: Of that model; its default if left out.
    namespace: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Destination:
        if sum(each is not None for each in (self.replica, self.pool, self.node, self.model)) != 1:
            raise ValueError("give one of replica, pool, node and model")
        if self.namespace is not None and self.model is None:
            raise ValueError("a namespace can only be given with a model")
        return self


class MigrateBody(BaseModel):
    """POST /v1/sessions/{id}/migrate."""

    model_config = ConfigDict(extra="forbid")

    to: Destination


def move_routes(services: Services) -> APIRouter:
    router = APIRouter()
    core, port = services.core, services.turns.port
    max_bytes = services.config.http.max_body_bytes

    @router.post("/v1/sessions/{session_id}/migrate", openapi_extra=json_body(MigrateBody))
    async def migrate_session(request: Request, session_id: str) -> Response:
        """Moves a session to another replica of its model, and what is being generated goes on there; or to another
        model, between two turns."""
        body = await read_model(request, MigrateBody, max_bytes)
        command = ShowSession(session_id=SessionId(session_id), with_tokens=True)
        state = (await ask(port, command, SessionHead)).state
        if body.to.model is not None:
            to_model = await move_to_model(services, caller_of(request), state, body.to.model, body.to.namespace)
            return _answer(session_id, False, to_model)
        target = find_target(core, core.catalog.find_model(state.model_id), body.to)
        if state.open_turn is None:
            return _answer(session_id, False, await _move_idle(services, state, target))
        moved = await services.running_moves.move(SessionId(session_id), target)
        if moved is None:
            raise Conflict("The session's turn is just beginning or ending; try again.", field="session_id")
        return _answer(session_id, True, moved)

    @router.post("/v1/replicas/{replica_id}/drain", openapi_extra=json_body(EmptyBody))
    async def drain_replica(request: Request, replica_id: str) -> Response:
        """The replica takes nothing new; what it runs goes to other replicas of its model as soon as there are any."""
        return await drain(request, replica_id, draining=True)

    @router.post("/v1/replicas/{replica_id}/resume", openapi_extra=json_body(EmptyBody))
    async def resume_replica(request: Request, replica_id: str) -> Response:
        """The replica takes requests again."""
        return await drain(request, replica_id, draining=False)

    async def drain(request: Request, replica_id: str, *, draining: bool) -> Response:
        await read_model(request, EmptyBody, max_bytes)
        connection = core.fleet.connection(ReplicaId(replica_id))
        if connection is None:
            raise NotFound(f"There is no replica {replica_id!r}; GET /v1/replicas lists them.", field="replica_id")
        await connection.link.drain(draining)
        return MsgspecJSONResponse({"id": replica_id, "object": "replica", "draining": draining})

    return router


def find_target(core: RouterCore, model_id: ModelId, to: Destination) -> ReplicaId:
    """Raises InvalidRequest when no replica of the model that takes requests is there."""
    candidates = [
        each
        for each in core.fleet.candidates(model_id)
        if to.replica in (None, each.replica_id)
        and to.pool in (None, each.pool_id)
        and to.node in (None, core.fleet.listed(each.replica_id).node_id)
    ]
    if not candidates:
        wanted = next(f"{name} {value!r}" for name, value in to.model_dump().items() if value is not None)
        raise InvalidRequest(
            f"to: no replica of {model_id} that takes requests is at {wanted}; GET /v1/replicas lists them.", field="to"
        )
    return least_loaded(candidates).replica_id


async def _move_idle(services: Services, state: SessionState, target: ReplicaId) -> Moved:
    """The next turn goes to the target; a pool that lacks the session's blocks gets them now."""
    core, started_s = services.core, time.monotonic()
    token_ids = unpack_tokens(state.token_bytes)
    tokens = TokenCounts(shared=len(token_ids))
    if core.moves.pool_of(state.owner) != core.moves.pool_of(target) and token_ids:
        request_id = RequestId(f"move-{uuid.uuid4().hex}")
        context = SessionContext(await core.fleet.card(state.model_id), state)
        log = context.engine_tokens(tuple(token_ids))
        job = precopy_job(
            request_id, state.model_id, state.namespace_id, log, target, owner=state.owner, context=context.plan
        )
        tokens = (await core.moves.precopy(job)).tokens
    await ask(services.turns.port, MoveSession(session_id=state.session_id, owner=target), SessionHead)
    return Moved(
        source=state.owner,
        replica=target,
        tokens=tokens,
        ranges=tokens.ranges(),
        pause_s=0.0,
        took_s=time.monotonic() - started_s,
    )


def _answer(session_id: str, running: bool, moved: Moved) -> Response:
    return MsgspecJSONResponse(
        {
            "id": session_id,
            "object": "session.move",
            "running": running,
            **transfer_document(moved),
            "pause_s": round(moved.pause_s, 6),
        }
    )
