"""The router as a Ray Serve deployment: HTTP in, one RouterCore behind it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from remora.cache_actors.registry import get_or_create_registry
from remora.cache_actors.registry_client import ReplicaDirectory
from remora.cache_actors.session_client import RegistrySessions
from remora.cache_actors.trace_reader import RemoteTraces
from remora.deployments.cluster_traces import ClusterTraces, LocalTraces
from remora.deployments.linked_replica import LinkedReplica
from remora.deployments.listed import Listed
from remora.deployments.model_states import ModelStates
from remora.deployments.models.load import load_tokenizer
from remora.deployments.moves import Moved
from remora.deployments.pool_reports import ClusterPools
from remora.deployments.rebalancer import Rebalancer
from remora.deployments.replica_link import ReplicaLink
from remora.deployments.router import RouterCore
from remora.deployments.serve_models import ServeModels
from remora.deployments.session_turns import SessionTurns
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import ReplicaId, RouterId, SessionId
from remora.platform.base.paths import default_state_dir
from remora.platform.base.serve_environment import bind_replica_to_loopback
from remora.platform.base.span_file import traces_dir
from remora.platform.base.telemetry import flush_telemetry, setup_telemetry
from remora.platform.base.threads import wake_promptly
from remora.platform.http.app import create_app
from remora.platform.http.http_stats import HttpStats
from remora.platform.http.router_metrics import Family, OneRouter, families_of
from remora.platform.http.running_moves import OwnMoves, decode_moves, move_encoded
from remora.platform.http.services import Services, Tokenizers

logger = logging.getLogger(__name__)

#: A scrape waits no longer for other routers.
PEERS_TIMEOUT_S = 2.0


class HttpRouter:
    """Serve builds the application from `__serve_build_asgi_app__` after the constructor."""

    async def __init__(self, config: RemoraConfig, models: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """`models`: name → Serve handle of the model's replicas."""
        logging.basicConfig(level=logging.INFO)
        bind_replica_to_loopback()
        wake_promptly()
        state_dir = config.cluster.state_dir or default_state_dir()
        setup_telemetry(
            "router", config.telemetry, state_dir, requests_begin_here=True, on_kept=self._keep_trace_everywhere
        )
        self._models = models
        registry = get_or_create_registry(config.cluster)
        serve_models = ServeModels(serve.get_replica_context().app_name, registry, config.models)
        self._core = RouterCore(
            config, self._connect, router_id=RouterId(f"router-{uuid.uuid4().hex[:12]}"), wake=serve_models.wake
        )
        self._directory = ReplicaDirectory(registry, self._on_change)
        self._turns = SessionTurns(RegistrySessions(registry))
        pools = ClusterPools(config.cluster.name)
        self._rebalancer = Rebalancer(self._core, config.rebalance, pools.reports, num_routers=config.http.num_routers)
        self._services = Services(
            config=config,
            core=self._core,
            tokenizers=Tokenizers(self._core.catalog.models, load_tokenizer),
            pools=pools,
            routers=_AllRouters(self._core) if config.http.num_routers > 1 else OneRouter(self._core.stats.registry),
            stats=HttpStats(self._core.stats.registry),
            turns=self._turns,
            running_moves=_AllMoves() if config.http.num_routers > 1 else OwnMoves(self._core),
            traces=ClusterTraces(
                own_node_id(),
                LocalTraces(traces_dir(state_dir)),
                list_nodes=self._nodes,
                connect=partial(RemoteTraces, config.cluster),
            ),
            states=ModelStates(self._core, serve_models.count_replicas),
            sleep=serve_models.sleep,
        )

    def _keep_trace_everywhere(self, trace_id: str) -> None:
        for connection in self._core.fleet.connections():
            connection.keep_trace(trace_id)

    async def move_own(self, session_id: str, target: str) -> bytes:
        """Moves the session's running request if this router has it, for whichever router was asked."""
        return await move_encoded(self._core, session_id, target)

    async def own_metrics(self) -> bytes:
        """This router's own metrics, for whichever router answers a scrape."""
        return msgspec.msgpack.encode(families_of(self._core.stats.registry))

    async def own_node(self) -> str:
        """Where this router runs, for whichever router shows traces."""
        return own_node_id()

    async def _nodes(self) -> set[str]:
        """Nodes with processes that write traces."""
        found = {record.node_id for record in self._directory.replicas()}
        if self._services.config.http.num_routers > 1:
            try:
                async with asyncio.timeout(PEERS_TIMEOUT_S):
                    found.update(await _routers().broadcast("own_node").results_async())
            except (RayError, RayServeException, TimeoutError) as error:
                logger.warning("not all routers say where they are: %s", str(error).partition("\n")[0])
        return found

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._services, self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        await self._directory.start()
        self._on_change()
        self._rebalancer.start()
        preload = asyncio.create_task(self._services.tokenizers.preload())
        yield
        preload.cancel()
        await self._rebalancer.stop()
        await self._directory.stop()
        await self._core.stop()
        await self._turns.stop()
        flush_telemetry(1.0)

    def _on_change(self) -> None:
        self._core.update_replicas(
            {
                record.replica_id: Listed(record.model_id, record.node_id, record.status != "draining")
                for record in self._directory.replicas()
            }
        )

    def _connect(self, replica_id: ReplicaId) -> ReplicaLink:
        (record,) = [each for each in self._directory.replicas() if each.replica_id == replica_id]
        return LinkedReplica(self._models[record.model_id], replica_id)


def own_node_id() -> str:
    """The Ray node of this process."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def _routers() -> Any:
    """A handle of this deployment: every router."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


class _AllMoves:
    """RunningMoves over Serve: the router that has the request moves it."""

    async def move(self, session_id: SessionId, target: ReplicaId) -> Moved | None:
        try:
            return decode_moves(await _routers().broadcast("move_own", session_id, target).results_async())
        except (RayError, RayServeException) as error:
            reason = str(error).partition("\n")[0]
            raise Unavailable(f"not all routers answer ({reason}); try again") from None


class _AllRouters:
    """RouterFamilies over Serve: asks every replica of this deployment."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    async def families(self) -> Sequence[Sequence[Family]]:
        try:
            async with asyncio.timeout(PEERS_TIMEOUT_S):
                answers = await _routers().broadcast("own_metrics").results_async()
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("not all routers answer: %s", str(error).partition("\n")[0])
            return [families_of(self._core.stats.registry)]
        return [msgspec.msgpack.decode(answer, type=tuple[Family, ...]) for answer in answers]
