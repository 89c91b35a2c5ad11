"""What operators change about namespaces while everything runs. What they hold: platform/http/admin.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from remora.deployments.precision_change import change_precision, quantise
from remora.namespaces.commands import Compacted, Quota, Trimmed
from remora.namespaces.quantise_commands import Quantised
from remora.platform.base.config_types import DEVICE_TIER, Tier
from remora.platform.base.ids import NamespaceId
from remora.platform.base.model_config import KVPrecision, precision_pair
from remora.platform.http.body import read_model
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.openapi import json_body
from remora.platform.http.pool_documents import namespace_document
from remora.platform.http.services import Services
from remora.platform.http.session_requests import EmptyBody


class QuotaBody(BaseModel):
    """PUT /v1/namespaces/{name}: what is given changes. Sizes are bytes, or texts such as "512MiB"."""

    model_config = ConfigDict(extra="forbid")

    guaranteed: Annotated[ByteSize, Field(ge=0)] | None = None
    limit: Annotated[ByteSize, Field(ge=0)] | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] | None = None
    #: Of new requests' KV; running ones keep theirs.
    kv_precision: KVPrecision | None = None
    #: Whose quota it is.
    tier: Tier = DEVICE_TIER

    @model_validator(mode="after")
    def _says_something(self) -> QuotaBody:
        if all(value is None for value in (self.guaranteed, self.limit, self.weight, self.kv_precision)):
            raise ValueError("give at least one of guaranteed, limit, weight and kv_precision")
        return self

    def change(self, quota: Quota) -> Quota:
        """The quota with what was given in place of what it had."""
        given: dict[str, float | int] = {}
        if self.guaranteed is not None:
            given["guaranteed_bytes"] = int(self.guaranteed)
        if self.limit is not None:
            given["limit_bytes"] = int(self.limit)
        if self.weight is not None:
            given["weight"] = self.weight
        return msgspec.structs.replace(quota, **given)


class TrimBody(BaseModel):
    """POST /v1/namespaces/{name}/trim."""

    model_config = ConfigDict(extra="forbid")

    #: What it may keep in each pool, running and cached; default: its guarantee.
    to: Annotated[ByteSize, Field(ge=0)] | None = None


class QuantizeBody(BaseModel):
    """POST /v1/namespaces/{name}/quantize."""

    model_config = ConfigDict(extra="forbid")

    #: New requests get it too; default: the one that they get, or int8 if that is not quantised.
    kv_precision: KVPrecision | None = None


def namespace_routes(services: Services) -> APIRouter:
    router = APIRouter()
    catalog = services.core.catalog
    max_bytes = services.config.http.max_body_bytes

    async def document(namespace_id: NamespaceId) -> Response:
        found = namespace_document(catalog, await services.pools.reports(), namespace_id)
        return MsgspecJSONResponse(found)

    @router.put("/v1/namespaces/{name:path}", openapi_extra=json_body(QuotaBody))
    async def set_quota(request: Request, name: str) -> Response:
        """Changes its quota in every pool, at once: cached blocks above a lowered limit go, then running sequences.

        Another KV precision is for new requests (deployments/precision_change.py)."""
        namespace_id = catalog.known_namespace(name)
        body = await read_model(request, QuotaBody, max_bytes)
        if body.kv_precision is None:
            await services.pools.set_quota(namespace_id, body.change)
        else:
            precision = precision_pair(body.kv_precision)
            await change_precision(services.core, services.pools, namespace_id, precision, body.change)
        return await document(namespace_id)

    @router.post("/v1/namespaces/{name:path}/trim", openapi_extra=json_body(TrimBody))
    async def trim(request: Request, name: str) -> Response:
        """Gives up its cache in every pool, down to `to` or its guarantee, and empty extents with it."""
        namespace_id = catalog.known_namespace(name)
        body = await read_model(request, TrimBody, max_bytes)
        return by_pool(await services.pools.trim(namespace_id, None if body.to is None else int(body.to)))

    @router.post("/v1/namespaces/{name:path}/compact", openapi_extra=json_body(EmptyBody))
    async def compact(request: Request, name: str) -> Response:
        """Moves the blocks of its model's geometry together in every pool, so that whole extents become free."""
        namespace_id = catalog.known_namespace(name)
        await read_model(request, EmptyBody, max_bytes)
        return by_pool(await services.pools.compact(namespace_id))

    @router.post("/v1/namespaces/{name:path}/quantize", openapi_extra=json_body(QuantizeBody))
    async def quantize(request: Request, name: str) -> Response:
        """Re-encodes what it has cached in other KV precisions in every pool, and frees the old blocks."""
        namespace_id = catalog.known_namespace(name)
        body = await read_model(request, QuantizeBody, max_bytes)
        wanted = None if body.kv_precision is None else precision_pair(body.kv_precision)
        (k_precision, v_precision), answers = await quantise(services.core, services.pools, namespace_id, wanted)
        return by_pool(answers, kv_precision={"k": k_precision, "v": v_precision})

    return router


def by_pool(
    answers: Mapping[str, Trimmed] | Mapping[str, Compacted] | Mapping[str, Quantised], **more: object
) -> Response:
    """What each pool did, without the answer's own tag."""
    pools = {pool_id: msgspec.structs.asdict(answer) for pool_id, answer in sorted(answers.items())}
    return MsgspecJSONResponse({**more, "pools": pools})
