"""One stage behind the first, as the replica sees it: its place, its worker, its lease.

    start   its bundle has a node ─► the device's pool there ─► a worker there, which loads ─► a lease for the worker
    end     the worker is killed ─► its pool has proof that it is gone, or the node is gone with all its memory

The replica may be on another node: it maps nothing of such a stage's pool, and only the pool can watch the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from remora.cache_actors.device_resources import actor_options, process_resources
from remora.cache_actors.pool_calls import await_pool
from remora.cache_actors.pool_client import PoolClient
from remora.cache_actors.pool_handles import get_or_create_pool
from remora.deployments.pipeline.base import StageCard, StageLease
from remora.deployments.pipeline.stage_worker import StageWorker
from remora.kernels.stages import StagePart
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import StageLost
from remora.platform.base.ids import ModelId, ReplicaId
from remora.platform.base.model_config import ModelConfig

logger = logging.getLogger(__name__)

#: How long a stage waits for a node that has its device, and the pause between two looks.
_PLACEMENT_TIMEOUT_S = 60.0
_PLACEMENT_PAUSE_S = 0.5
#: A pool that has not answered is asked again: it may be coming back.
_REVOKE_TIMEOUT_S = 5.0

#: "waiting": no node with its device is there.
StageState = Literal["waiting", "loading", "ready", "lost"]


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, for operators."""

    stage: int
    device: str
    #: "" while there is none.
    node: str
    state: StageState
    #: 0 while there is none.
    pid: int
    first_layer: int
    num_layers: int
    #: How often it was started again.
    num_restarts: int


class StageHandle:
    """On the replica's event loop. `start` once, then `end`."""

    def __init__(
        self,
        config: RemoraConfig,
        model_config: ModelConfig,
        part: StagePart,
        *,
        replica_id: ReplicaId,
        own_node_id: str,
        on_lost: Callable[[StageHandle, str], None],
    ) -> None:
        """`on_lost` is called once, unless `end` was."""
        self.stage = part.stage
        self.state: StageState = "loading"
        self.node_id = ""
        self.actor: Any = None
        self.card: StageCard | None = None
        self.lease: PoolClient | None = None
        self._config = config
        self._model_config = model_config
        self._part = part
        self._device = next(each for each in config.devices if each.name == model_config.stage_devices[part.stage])
        self._replica_id = replica_id
        self._own_node_id = own_node_id
        self._on_lost = on_lost
        self._pool: Any = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """0 until it is known."""
        return self.card.process.pid if self.card is not None else 0

    async def start(self, group: PlacementGroup) -> None:
        """Until the worker is loaded and has its memory.

        Raises ConfigError, ArenaError, PoolError, StageLost for want of a node, and Ray's errors around the worker's.
        """
        node_id = self.node_id = await self._placed(group)
        pool = self._pool = await asyncio.to_thread(get_or_create_pool, self._config, self._device.name, node_id)
        binding = await await_pool(pool)
        self.actor = (
            ray.remote(StageWorker)
            .options(
                **actor_options(process_resources([self._device])),
                max_restarts=0,
                # `ended` waits beside the other methods.
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, self.stage),
            )
            .remote(self._config, self._model_config.name, self._part, self._device.name, binding.device_uuid)
        )
        card = self.card = await self.actor.load.remote()
        lease = self.lease = await PoolClient.attach(
            pool,
            replica_id=ReplicaId(f"{self._replica_id}/stage-{self.stage}"),
            model_id=ModelId(self._model_config.name),
            geometry=card.geometry,
            fingerprint=card.fingerprint,
            # The process that writes: only when it is gone are its blocks anybody's.
            process=card.process,
            maps=node_id == self._own_node_id and self._device.kind == "cpu",
            reserved_bytes=card.weights_bytes,
            on_lost=self._lose,
        )
        assert lease.attached is not None, "an attached lease says how"
        await self.actor.attach.remote(
            StageLease(
                arena_path=lease.binding.arena_path,
                ipc_handle=lease.binding.ipc_handle,
                step_lock_path=lease.binding.step_lock_path,
                lease_slot=lease.attached.lease_slot,
                generation=lease.attached.generation,
                incarnation=lease.attached.incarnation,
                weight=self._config.step_weight_of(self._model_config),
            )
        )

    def connected(self) -> None:
        """It computes from now on; its end will be noticed also while nothing is computed."""
        if self.state != "lost":
            self.state = "ready"
        self._watcher = asyncio.create_task(self._watch(), name=f"stage-{self.stage}")

    async def end(self) -> None:
        """Returns when the process is gone, or its node with its memory."""
        self.state = "lost"
        if self._watcher is not None:
            self._watcher.cancel()
        if self.actor is not None:
            ray.kill(self.actor)
        if self.lease is not None:
            await self._revoke(self.lease)
            await self.lease.abandon()

    # ---- inside

    async def _placed(self, group: PlacementGroup) -> str:
        """The node of its bundle."""
        deadline_s = time.monotonic() + _PLACEMENT_TIMEOUT_S
        while not (node_id := await asyncio.to_thread(bundle_node, group, self.stage)):
            if self.state != "waiting":
                self.state = "waiting"
                logger.warning("stage %d waits for a node with device %s", self.stage, self._device.name)
            if time.monotonic() > deadline_s:
                raise StageLost(f"no node with device {self._device.name} for {_PLACEMENT_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_PLACEMENT_PAUSE_S)
        self.state = "loading"
        return node_id

    async def _watch(self) -> None:
        try:
            reason = await self.actor.ended.remote()
        except ray.exceptions.RayError as error:
            reason = str(error).partition("\n")[0]
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.state != "lost":
            self.state = "lost"
            self._on_lost(self, reason)

    async def _revoke(self, lease: PoolClient) -> None:
        while self.node_id in await asyncio.to_thread(_living_nodes):
            try:
                async with asyncio.timeout(_REVOKE_TIMEOUT_S):
                    await self._pool.revoke.remote(lease.lease_id, f"stage {self.stage} is ended")
                return
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("the pool of stage %d does not answer: %s", self.stage, str(error).partition("\n")[0])
                await asyncio.sleep(_PLACEMENT_PAUSE_S)


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def bundle_node(group: PlacementGroup, bundle: int) -> str:
    """ "" while the bundle has no living node."""
    node_id: str = ray.util.placement_group_table(group)["bundles_to_node_id"].get(bundle) or ""
    return node_id if node_id in _living_nodes() else ""
