"""What operators ask: namespaces, pools, replicas, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from remora.deployments.replica_connection import ReplicaConnection
from remora.platform.base.errors import RemoraError
from remora.platform.http.caller import caller_of
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.metrics import CONTENT_TYPE, render_metrics
from remora.platform.http.pool_documents import namespace_document, pool_document
from remora.platform.http.services import Services

#: A replica or pool that does not answer in this time is shown without figures.
STATS_TIMEOUT_S = 2.0


def admin_routes(services: Services) -> APIRouter:
    router = APIRouter()
    core = services.core

    def answer(data: Any) -> Response:
        return MsgspecJSONResponse({"object": "list", "data": data})

    @router.get("/v1/namespaces")
    async def list_namespaces(request: Request) -> Response:
        """The caller's namespaces with their quotas, and what they hold in each pool."""
        pools, caller = await services.pools.reports(), caller_of(request)
        own = [name for name in core.catalog.namespaces if caller.sees(name)]
        return answer([namespace_document(core.catalog, pools, name) for name in own])

    @router.get("/v1/namespaces/{name:path}")
    async def show_namespace(name: str) -> Response:
        """One namespace; in each pool also what its lookups say about the size it could use."""
        namespace_id = core.catalog.known_namespace(name)
        document = namespace_document(core.catalog, await services.pools.reports(), namespace_id)
        return MsgspecJSONResponse(document)

    @router.get("/v1/pools")
    async def list_pools() -> Response:
        """Every pool that answers: arena, extents, blocks, namespaces."""
        pools = await services.pools.reports()
        return answer([pool_document(pool_id, pool) for pool_id, pool in sorted(pools.items())])

    @router.get("/v1/replicas")
    async def list_replicas() -> Response:
        """Every listed replica, as this router sees it."""
        connections = core.fleet.connections()
        stats = await asyncio.gather(*(replica_stats(connection) for connection in connections))
        return answer(
            [
                {
                    "id": connection.replica_id,
                    "model": core.fleet.listed(connection.replica_id).model_id,
                    "node": core.fleet.listed(connection.replica_id).node_id,
                    "connected": connection.connected,
                    "draining": connection.leaving or not core.fleet.listed(connection.replica_id).accepts,
                    "load_tokens": connection.reported.load_tokens,
                    "card": _card(connection),
                    "pipeline": figures.pop("pipeline", []) if figures is not None else None,
                    "stats": figures,
                }
                for connection, figures in zip(connections, stats, strict=True)
            ]
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text: every router, every replica, every pool."""
        connections = core.fleet.connections()
        routers, pools, states, *stats = await asyncio.gather(
            services.routers.families(),
            services.pools.reports(),
            services.states.all(),
            *(replica_stats(connection) for connection in connections),
        )
        replicas = {
            (connection.replica_id, core.fleet.listed(connection.replica_id).model_id): figures
            for connection, figures in zip(connections, stats, strict=True)
            if figures is not None
        }
        return Response(render_metrics(core, routers, replicas, pools, states), media_type=CONTENT_TYPE)

    return router


def _card(connection: ReplicaConnection) -> dict[str, Any] | None:
    if connection.card is None:
        return None
    card = connection.card
    namespaces = {
        name: {"fingerprint": each.fingerprint.hex(), "block_bytes": each.block_bytes}
        for name, each in card.namespaces.items()
    }
    return {**msgspec.to_builtins(card), "fingerprint": card.fingerprint.hex(), "namespaces": namespaces}


async def replica_stats(connection: ReplicaConnection) -> dict[str, Any] | None:
    """The engine's figures; None when the replica cannot be asked."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await connection.link.stats() if connection.connected else None
    except (RemoraError, TimeoutError):
        return None
