"""The replicas that a router knows: what the directory lists, a connection to each, and what each says of its model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext

from remora.deployments.catalog import Catalog
from remora.deployments.listed import Listed
from remora.deployments.model_card import ModelCard
from remora.deployments.placement import Candidate
from remora.deployments.replica_connection import Connect, ConnectionOwner, ReplicaConnection
from remora.deployments.waker import Waker
from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import ModelId, ReplicaId, RouterId
from remora.platform.base.telemetry import span


class Fleet:
    """Owned by the router's event loop. Told of replicas by `update`; `stop` ends all connections."""

    def __init__(
        self, catalog: Catalog, connect: Connect, owner: ConnectionOwner, *, router_id: RouterId, waker: Waker
    ) -> None:
        self._catalog = catalog
        self._connect = connect
        self._owner = owner
        self._router_id = router_id
        self._waker = waker
        self._cards: dict[ModelId, ModelCard] = {}
        self._connections: dict[ReplicaId, ReplicaConnection] = {}
        self._listed: dict[ReplicaId, Listed] = {}
        self._tasks: dict[ReplicaId, asyncio.Task[None]] = {}

    def update(self, listed: Mapping[ReplicaId, Listed]) -> None:
        """Takes over the directory: connects to replicas that are new in it, leaves those that are gone."""
        self._listed = {key: each for key, each in listed.items() if each.model_id in self._catalog.models}
        for replica_id in [known for known in self._tasks if known not in self._listed]:
            self._connections.pop(replica_id)
            self._tasks.pop(replica_id).cancel()
        for replica_id in self._listed:
            if replica_id not in self._tasks:
                connection = ReplicaConnection(replica_id, self._connect(replica_id), self._router_id, self._owner)
                self._connections[replica_id] = connection
                self._tasks[replica_id] = asyncio.create_task(connection.run(), name=f"feed-{replica_id}")

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def note_card(self, card: ModelCard) -> None:
        """A replica described its model."""
        self._cards[card.model_id] = card

    # ---- questions ---------------------------------------------------------------------------------------------------

    def connections(self) -> list[ReplicaConnection]:
        """Of all listed replicas, connected or not."""
        return list(self._connections.values())

    def connection(self, replica_id: ReplicaId) -> ReplicaConnection | None:
        return self._connections.get(replica_id)

    def listed(self, replica_id: ReplicaId) -> Listed:
        return self._listed[replica_id]

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        """Connected replicas of the model that take requests."""
        return [connection.candidate() for connection in self._connected(model_id)]

    def draining(self) -> list[ReplicaId]:
        """Replicas that take nothing new."""
        return [
            replica_id
            for replica_id, connection in self._connections.items()
            if connection.leaving or not self._listed[replica_id].accepts
        ]

    def is_ready(self, model_id: ModelId) -> bool:
        """Whether a replica of the model is connected now."""
        return bool(self._connected(model_id))

    def missing_models(self) -> list[ModelId]:
        """Models that have no connected replica, and that no request would wake."""
        return [
            model_id
            for model_id in self._catalog.models
            if not self.is_ready(model_id) and not self._waker.can_sleep(model_id)
        ]

    def known_card(self, model_id: ModelId) -> ModelCard | None:
        """The model's card; None before its first replica."""
        return self._cards.get(model_id)

    async def card(self, model_id: ModelId, trace_context: Mapping[str, str] | None = None) -> ModelCard:
        """The model's card; waits for a first replica up to the model's longest wait, then raises Unavailable.

        `trace_context`: of the request that needs it, which shows the wait if the model has to be woken.
        """
        if model_id not in self._cards:
            self._waker.need(model_id)
            waiting = span(names.MODEL_WAKE, parent=trace_context) if self._waker.can_sleep(model_id) else nullcontext()
            with waiting:
                await self._first_card(model_id)
        return self._cards[model_id]

    async def _first_card(self, model_id: ModelId) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._waker.max_wait_s(model_id)
        while model_id not in self._cards:
            if asyncio.get_running_loop().time() >= deadline_s:
                raise Unavailable(f"No replica of the model {model_id!r} is up yet; try again.", retry_after_s=5.0)
            await asyncio.sleep(0.05)

    def _connected(self, model_id: ModelId) -> list[ReplicaConnection]:
        return [
            connection
            for replica_id, connection in self._connections.items()
            if connection.connected and not connection.leaving and self._listed[replica_id].takes(model_id)
        ]
