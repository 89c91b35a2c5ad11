"""What operators ask: namespaces, pools, replicas, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from msgspec.json import encode as to_json

from remora.deployments.replica_connection import ReplicaConnection
from remora.platform.base.errors import RemoraError
from remora.platform.base.ids import NamespaceId
from remora.platform.http.metrics import CONTENT_TYPE, render_metrics
from remora.platform.http.services import Services

#: A replica or pool that does not answer in this time is shown without figures.
STATS_TIMEOUT_S = 2.0


def admin_routes(services: Services) -> APIRouter:
    router = APIRouter()
    core = services.core

    def answer(data: Any) -> Response:
        return Response(to_json({"object": "list", "data": data}), media_type="application/json")

    @router.get("/v1/namespaces")
    async def list_namespaces() -> Response:
        """Every namespace with its quota, and what it holds in each pool."""
        reports = await pool_reports(services)
        return answer([namespace_document(services, reports, name) for name in core.catalog.namespaces])

    @router.get("/v1/pools")
    async def list_pools() -> Response:
        """Every pool that answers: arena, extents, blocks, namespaces."""
        reports = await pool_reports(services)
        return answer([{"id": pool_id, **report} for pool_id, report in sorted(reports.items())])

    @router.get("/v1/replicas")
    async def list_replicas() -> Response:
        """Every listed replica, as this router sees it."""
        connections = core.connections()
        stats = await asyncio.gather(*(replica_stats(connection) for connection in connections))
        return answer(
            [
                {
                    "id": connection.replica_id,
                    "model": core.model_of(connection.replica_id),
                    "connected": connection.connected,
                    "load_tokens": connection.reported_load_tokens,
                    "card": _card(connection),
                    "stats": figures,
                }
                for connection, figures in zip(connections, stats, strict=True)
            ]
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text: this router, every replica, every pool."""
        connections = core.connections()
        reports, *stats = await asyncio.gather(
            pool_reports(services), *(replica_stats(connection) for connection in connections)
        )
        replicas = {
            (connection.replica_id, core.model_of(connection.replica_id)): figures
            for connection, figures in zip(connections, stats, strict=True)
            if figures is not None
        }
        return Response(render_metrics(core, replicas, reports), media_type=CONTENT_TYPE)

    return router


def _card(connection: ReplicaConnection) -> dict[str, Any] | None:
    if connection.card is None:
        return None
    return {**msgspec.to_builtins(connection.card), "fingerprint": connection.card.fingerprint.hex()}


async def replica_stats(connection: ReplicaConnection) -> dict[str, Any] | None:
    """The engine's figures; None when the replica cannot be asked."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await connection.link.stats() if connection.connected else None
    except (RemoraError, TimeoutError):
        return None


async def pool_reports(services: Services) -> dict[str, dict[str, Any]]:
    """Pool id → its report, as plain data."""
    return {str(pool_id): msgspec.to_builtins(each) for pool_id, each in (await services.pools.reports()).items()}


def namespace_document(services: Services, reports: dict[str, dict[str, Any]], name: NamespaceId) -> dict[str, Any]:
    """Configuration of a namespace and its usage per pool."""
    namespace = services.core.catalog.namespaces[name]
    usage = {
        pool_id: figures
        for pool_id, report in sorted(reports.items())
        for figures in report.get("namespaces", ())
        if figures.get("namespace_id") == name
    }
    return {
        "id": name,
        "object": "namespace",
        "model": namespace.model,
        "tenant": namespace.tenant,
        "share_group": namespace.share_group,
        "weight": namespace.weight,
        "guaranteed_bytes": int(namespace.guaranteed),
        "limit_bytes": None if namespace.limit is None else int(namespace.limit),
        "pools": usage,
    }
