"""GET /v1/models, /health and /ready."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from remora.platform.base.ids import ModelId
from remora.platform.http.caller import Caller, caller_of
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.services import Services


def model_routes(services: Services, *, created: int) -> APIRouter:
    """`created`: Unix seconds that the models show as their creation."""
    router = APIRouter()
    core = services.core

    def shown(caller: Caller, model_id: ModelId) -> dict[str, Any]:
        card = core.fleet.known_card(model_id)
        model = core.catalog.models[model_id]
        return {
            "id": model_id,
            "object": "model",
            "created": created,
            "owned_by": "remora",
            "root": model.source,
            "max_model_len": None if card is None else card.max_model_len,
            "ready": core.fleet.is_ready(model_id),
            "namespaces": list(caller.namespaces_of(core.catalog, model_id)),
        }

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The caller's models; `ready` says whether a replica serves it now."""
        caller = caller_of(request)
        own = [model_id for model_id in core.catalog.models if caller.namespaces_of(core.catalog, model_id)]
        data = [shown(caller, model_id) for model_id in own]
        return MsgspecJSONResponse({"object": "list", "data": data})

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(request: Request, model: str) -> Response:
        """One model."""
        caller = caller_of(request)
        return MsgspecJSONResponse(shown(caller, caller.find_model(core.catalog, model)))

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The router answers."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> Response:
        """503 until every model has a replica."""
        missing = core.fleet.missing_models()
        status = {"status": "starting" if missing else "ready", "missing": missing}
        return MsgspecJSONResponse(status, status_code=503 if missing else 200)

    return router
