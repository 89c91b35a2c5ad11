"""The router as a Ray Serve deployment: HTTP in, one RouterCore behind it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from remora.cache_actors.registry import get_or_create_registry
from remora.cache_actors.registry_client import ReplicaDirectory
from remora.deployments.models.load import load_tokenizer
from remora.deployments.pool_reports import ClusterPools
from remora.deployments.replica_link import ReplicaLink
from remora.deployments.router import Listed, RouterCore
from remora.deployments.serve_link import ServeLink
from remora.platform.base.config import RemoraConfig
from remora.platform.base.ids import ReplicaId, RouterId
from remora.platform.base.paths import default_state_dir
from remora.platform.base.serve_environment import bind_replica_to_loopback
from remora.platform.base.telemetry import flush_telemetry, setup_telemetry
from remora.platform.http.app import create_app
from remora.platform.http.http_stats import HttpStats
from remora.platform.http.services import Services, Tokenizers

logger = logging.getLogger(__name__)


class HttpRouter:
    """Serve builds the application from `__serve_build_asgi_app__` after the constructor."""

    async def __init__(self, config: RemoraConfig, models: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """`models`: name → Serve handle of the model's replicas."""
        logging.basicConfig(level=logging.INFO)
        bind_replica_to_loopback()
        setup_telemetry("router", config.telemetry, config.cluster.state_dir or default_state_dir())
        self._models = models
        self._core = RouterCore(config, self._connect, router_id=RouterId(f"router-{uuid.uuid4().hex[:12]}"))
        self._directory = ReplicaDirectory(get_or_create_registry(config.cluster), self._on_change)
        self._services = Services(
            config=config,
            core=self._core,
            tokenizers=Tokenizers(self._core.catalog.models, load_tokenizer),
            pools=ClusterPools(config.cluster.name),
            stats=HttpStats(self._core.stats.registry),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._services, self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        await self._directory.start()
        self._on_change()
        preload = asyncio.create_task(self._services.tokenizers.preload())
        yield
        preload.cancel()
        await self._directory.stop()
        await self._core.stop()
        flush_telemetry(1.0)

    def _on_change(self) -> None:
        self._core.update_replicas(
            {
                record.replica_id: Listed(record.model_id, record.status != "draining")
                for record in self._directory.replicas()
            }
        )

    def _connect(self, replica_id: ReplicaId) -> ReplicaLink:
        (record,) = [each for each in self._directory.replicas() if each.replica_id == replica_id]
        return ServeLink(self._models[record.model_id], replica_id)
