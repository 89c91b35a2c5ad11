"""The models and whether they can be used: /v1/models, /health and /ready; putting them to sleep and waking them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from remora.deployments.model_states import ModelState
from remora.platform.base.errors import Conflict
from remora.platform.base.ids import ModelId
from remora.platform.http.body import read_model
from remora.platform.http.caller import Caller, caller_of
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.openapi import json_body
from remora.platform.http.services import Services
from remora.platform.http.session_requests import EmptyBody


def model_routes(services: Services, *, created: int) -> APIRouter:
    """`created`: Unix seconds that the models show as their creation."""
    router = APIRouter()
    core, max_bytes = services.core, services.config.http.max_body_bytes

    def shown(caller: Caller, model_id: ModelId, state: ModelState) -> dict[str, Any]:
        card = core.fleet.known_card(model_id)
        model = core.catalog.models[model_id]
        return {
            "id": model_id,
            "object": "model",
            "created": created,
            "owned_by": "remora",
            "root": model.source,
            "max_model_len": None if card is None else card.max_model_len,
            "ready": state == "ready",
            "state": state,
            "namespaces": list(caller.namespaces_of(core.catalog, model_id)),
        }

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The caller's models; `state` is ready, asleep or starting."""
        caller, states = caller_of(request), await services.states.all()
        own = [model_id for model_id in core.catalog.models if caller.namespaces_of(core.catalog, model_id)]
        data = [shown(caller, model_id, states[model_id]) for model_id in own]
        return MsgspecJSONResponse({"object": "list", "data": data})

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(request: Request, model: str) -> Response:
        """One model."""
        caller = caller_of(request)
        model_id = caller.find_model(core.catalog, model)
        return MsgspecJSONResponse(shown(caller, model_id, (await services.states.all())[model_id]))

    @router.post("/v1/models/{model:path}/sleep", openapi_extra=json_body(EmptyBody))
    async def sleep(request: Request, model: str) -> Response:
        """Stops the replicas of a model that has nothing to do, as its `idle_timeout_s` would; its KV stays."""
        model_id = await sleeper(request, model)
        await services.sleep(model_id)
        return MsgspecJSONResponse({"id": model_id, "object": "model", "state": "asleep"})

    @router.post("/v1/models/{model:path}/wake", openapi_extra=json_body(EmptyBody))
    async def wake(request: Request, model: str) -> Response:
        """Starts the replicas of a model that sleeps, as its next request would, and returns when it is ready."""
        model_id = await sleeper(request, model)
        await core.waker.ready(model_id)
        return MsgspecJSONResponse({"id": model_id, "object": "model", "state": "ready"})

    async def sleeper(request: Request, model: str) -> ModelId:
        await read_model(request, EmptyBody, max_bytes)
        model_id = caller_of(request).find_model(core.catalog, model)
        if not core.waker.can_sleep(model_id):
            raise Conflict(f"model: {model_id} never sleeps; give it an idle_timeout_s in the configuration.")
        return model_id

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The router answers."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> Response:
        """503 until every model has a replica; those that may sleep are started by their next request."""
        missing = core.fleet.missing_models()
        status = {"status": "starting" if missing else "ready", "missing": missing}
        return MsgspecJSONResponse(status, status_code=503 if missing else 200)

    return router
