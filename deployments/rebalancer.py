"""Looks at the replicas of each model at intervals and moves what `Rebalance` decides, one request at a time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from remora.cache_actors.pool_messages import PoolDescription
from remora.deployments.free_memory import free_tokens
from remora.deployments.rebalance import Decision, FreeTokens, MovableRequest, Rebalance, ReplicaReport
from remora.deployments.replica_connection import ReplicaConnection
from remora.deployments.request_stream import RequestStream
from remora.platform.base.errors import RemoraError
from remora.platform.base.ids import ModelId, PoolId
from remora.platform.base.rebalance_config import RebalanceConfig

if TYPE_CHECKING:
    from remora.deployments.router import RouterCore

logger = logging.getLogger(__name__)

#: A request that may generate no more than this is not worth a move; blocks that are computed for others are such.
MIN_TOKENS_TO_COME = 16

#: Asks the pools how they are.
PoolReports = Callable[[], Awaitable[Mapping[str, PoolDescription]]]


class Rebalancer:
    """Of one router; lives on its event loop."""

    def __init__(
        self, core: RouterCore, config: RebalanceConfig, pool_reports: PoolReports, *, num_routers: int = 1
    ) -> None:
        self._core = core
        self._config = config
        self._pool_reports = pool_reports
        self._rules = {model_id: Rebalance(config, num_routers=num_routers) for model_id in core.catalog.models}
        self._random = random.Random()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks from now on, unless that is switched off."""
        if self._config.enabled:
            self._task = asyncio.create_task(self._run(), name="rebalance")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            # Not in step with other routers.
            await asyncio.sleep(self._config.interval_s * self._random.uniform(0.8, 1.2))
            try:
                await self.look()
            except Exception:
                # Whatever it is, requests run well enough where they are.
                logger.exception("requests are not rebalanced this time")

    async def look(self) -> list[Decision]:
        """Decides once for each model; returns when what it decided has been done."""
        decisions = []
        for model_id, rules in self._rules.items():
            reports = self._reports(model_id)
            if len(reports) < 2:
                continue
            streams = {
                stream.request_id: stream
                for report in reports
                for stream in self._core.streams_at(report.replica_id)
                if _is_movable(stream)
            }
            for stream in streams.values():
                if stream.moved_s is not None:
                    rules.note_moved(stream.request_id, stream.moved_s)
            requests = [movable for stream in streams.values() if (movable := _movable(stream)) is not None]
            free: FreeTokens = {}
            if requests and rules.lacks_memory(reports):
                free = free_tokens(await self._pool_reports(), await self._core.fleet.card(model_id))
            decision = rules.decide(asyncio.get_running_loop().time(), reports, requests, free)
            if decision is not None:
                decisions.append(decision)
                await self._move(streams[decision.request_id], decision)
        return decisions

    def _reports(self, model_id: ModelId) -> list[ReplicaReport]:
        """Of the replicas that take requests of the model."""
        device_tokens: Counter[PoolId] = Counter()
        for connection in self._core.fleet.connections():
            if connection.card is not None:
                device_tokens[connection.card.pool_id] += _running_tokens(connection)
        reports = []
        for candidate in self._core.fleet.candidates(model_id):
            found = self._core.fleet.connection(candidate.replica_id)
            if found is not None:
                reports.append(
                    ReplicaReport(
                        replica_id=candidate.replica_id,
                        pool_id=candidate.pool_id,
                        device_tokens=device_tokens[candidate.pool_id],
                        waiting_tokens=found.reported.waiting_tokens,
                        parked_tokens=found.reported.parked_tokens,
                    )
                )
        return reports

    async def _move(self, stream: RequestStream, decision: Decision) -> None:
        core = self._core
        logger.info("request %s goes to %s: %s", stream.request_id, decision.target, decision.cause)
        try:
            if not stream.log.empty:
                await core.moves.move(stream, decision.target, decision.cause)
            elif _is_movable(stream):
                # It has nothing yet that could pause: whether and when it begins there is as at any replica.
                core.move(stream, decision.target)
                core.stats.requeued(stream.request.model_id, decision.cause)
        except RemoraError as error:
            core.stats.move_failed(stream.request.model_id, decision.cause)
            logger.info("request %s stays: %s", stream.request_id, error)


def _running_tokens(connection: ReplicaConnection) -> int:
    return connection.reported.load_tokens - connection.reported.waiting_tokens


def _is_movable(stream: RequestStream) -> bool:
    to_come = stream.request.sampling.max_tokens * stream.request.num_choices - stream.log.num_tokens
    return (
        stream.replica_id is not None
        and not stream.is_landing
        and not stream.is_moving
        and not stream.is_bound
        and not stream.log.finished
        and to_come > MIN_TOKENS_TO_COME
    )


def _movable(stream: RequestStream) -> MovableRequest | None:
    request = stream.request
    if stream.replica_id is None:
        return None
    return MovableRequest(
        request_id=request.request_id,
        replica_id=stream.replica_id,
        namespace_id=request.namespace_id,
        num_tokens=len(request.prompt_token_ids) * request.num_choices + stream.log.num_tokens,
        has_started=not stream.log.empty,
    )
