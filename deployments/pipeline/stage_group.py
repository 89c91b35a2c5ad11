"""The stages behind the first of one replica's model: their workers, their leases, and what happens when one is gone.

    start      workers load ─► a lease for each worker's process on its device's pool ─► channels
    a stage is gone (its process has ended, its lease is lost, it is silent)
               ─► requests let go and wait ─► all workers are ended ─► start again ─► requests go on
    stop, or the replica's death: workers end with it

The pools outlive the workers, with everything that was published. All stages start again together: what a living one
has in work belongs to steps that will never end, and its channels lead to a process that is gone. A worker's blocks are
given back only when its process is proven gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

import ray
from ray.util.placement_group import get_current_placement_group

from remora.cache_actors.pool_client import PoolClient
from remora.cache_actors.port import StepGate
from remora.cache_actors.stage_pools import StagePools
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.pipeline.connect import connect_stages
from remora.deployments.pipeline.pipeline_decoder import PipelineDecoder, PipelineLimits
from remora.deployments.pipeline.stage_handle import StageHandle, StageStatus
from remora.kernels.stages import StagePart
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import RemoraError, StageLost
from remora.platform.base.ids import ReplicaId
from remora.platform.base.model_config import ModelConfig

logger = logging.getLogger(__name__)

#: A stage that is silent for so long is lost.
_DEADLINE_S = 60.0
#: Starts after a loss that may fail one after the other before the replica gives up, and the pause between them.
_MAX_ATTEMPTS = 3
_PAUSE_S = 1.0


class StageGroup:
    """Of one replica; on its event loop."""

    def __init__(
        self,
        config: RemoraConfig,
        model_config: ModelConfig,
        model: LoadedModel,
        split: tuple[int, ...],
        *,
        replica_id: ReplicaId,
        node_id: str,
        gate: StepGate,
        lease: PoolClient,
        on_dead: Callable[[str], object],
    ) -> None:
        """`model` is stage 0, computed by this process with this lease and gate. `on_dead`: it cannot be started again,
        and the replica must end."""
        assert model.shape is not None, "what runs through transformers is not split"
        self._config = config
        self._model_config = model_config
        self._model = model
        self._split = split
        self._replica_id = replica_id
        self._node_id = node_id
        self._gate = gate
        self._lease = lease
        self._on_dead = on_dead
        self._loop = asyncio.get_running_loop()
        self._limits = PipelineLimits(
            num_stages=len(split),
            hidden_size=model.shape.hidden_size,
            vocab_size=model.vocab_size,
            max_blocks=-(-(model.max_model_len + 1) // model.geometry.block_tokens),
            max_num_seqs=model_config.max_num_seqs,
            max_step_tokens=model_config.max_step_tokens,
            max_in_flight=len(split),
            deadline_s=_DEADLINE_S,
        )
        group = get_current_placement_group()
        assert group is not None, "a pipeline's replica has a bundle for each stage"
        self._placement = group
        self._stages: list[StageHandle] = []
        self._restarting: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._num_restarts = 0
        self.pools: StagePools
        #: Given to the engine with each start; its first is the model's decoder.
        self.decoder: PipelineDecoder
        #: Hands a new decoder to the engine.
        self.on_connected: Callable[[PipelineDecoder], object] = lambda decoder: None

    async def start(self) -> None:
        """Raises ModelError, ArenaError, PoolError, ConfigError or StageLost; nothing is left then."""
        await self._make_stages()
        leases = [stage.lease for stage in self._stages if stage.lease is not None]
        geometries = [self._model.geometry, *(stage.card.geometry for stage in self._stages if stage.card is not None)]
        self.pools = StagePools([self._lease, *leases], geometries)
        try:
            self.decoder = await self._connect()
        except BaseException:
            await self._end_stages()
            raise

    def stage_lost(self, reason: str) -> None:
        """From any thread: a stage is gone, so that all start again. Harmless when they are at it."""
        self._loop.call_soon_threadsafe(self._begin_restart, reason)

    def describe(self) -> tuple[StageStatus, ...]:
        """Every stage, the first included."""
        known = {stage.stage: stage for stage in self._stages}
        found = []
        for stage, device in enumerate(self._model_config.stage_devices):
            handle = known.get(stage)
            found.append(
                StageStatus(
                    stage=stage,
                    device=device,
                    node=self._node_id if stage == 0 else handle.node_id if handle else "",
                    state="ready" if stage == 0 else handle.state if handle else "lost",
                    pid=os.getpid() if stage == 0 else handle.pid if handle else 0,
                    first_layer=sum(self._split[:stage]),
                    num_layers=self._split[stage],
                    num_restarts=self._num_restarts if stage else 0,
                )
            )
        return tuple(found)

    async def stop(self) -> None:
        """Ends all workers; the engine must have stopped."""
        self._is_stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        self.decoder.close()
        await self._end_stages()

    # ---- inside

    async def _make_stages(self) -> None:
        """Workers that are loaded and have their memory."""
        self._stages = [
            StageHandle(
                self._config,
                self._model_config,
                StagePart(split=self._split, stage=stage),
                replica_id=self._replica_id,
                own_node_id=self._node_id,
                on_lost=self._stage_ended,
            )
            for stage in range(1, len(self._split))
        ]
        try:
            async with asyncio.TaskGroup() as starting:
                for stage in self._stages:
                    starting.create_task(stage.start(self._placement))
        except BaseException as error:
            await self._end_stages()
            first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            cause = getattr(first, "cause", first)
            if isinstance(cause, RemoraError):
                raise cause from None
            if isinstance(first, ray.exceptions.RayError):
                raise StageLost(f"a stage of {self._model.name!r} did not start: {first}") from None
            raise

    async def _connect(self) -> PipelineDecoder:
        decoder = await asyncio.to_thread(
            connect_stages,
            self._model,
            [stage.actor for stage in self._stages],
            [stage.card for stage in self._stages if stage.card is not None],
            limits=self._limits,
            gate=self._gate,
            tables=self.pools,
            cluster_name=self._config.cluster.name,
        )
        for stage in self._stages:
            stage.connected()
        return decoder

    def _stage_ended(self, stage: StageHandle, reason: str) -> None:
        if stage in self._stages:
            self._begin_restart(f"stage {stage.stage} on {self._model_config.stage_devices[stage.stage]}: {reason}")

    def _begin_restart(self, reason: str) -> None:
        if not self._is_stopping and (self._restarting is None or self._restarting.done()):
            logger.error("the stages of %s start again: %s", self._model.name, reason)
            self.pools.lose_all(reason)
            self._restarting = self._loop.create_task(self._restart())

    async def _restart(self) -> None:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                await self._end_stages()
                await self._make_stages()
                self.decoder = await self._connect()
            except Exception as error:
                logger.exception("attempt %d to start the stages of %s failed", attempt, self._model.name)
                if attempt == _MAX_ATTEMPTS:
                    self._on_dead(f"its stages cannot be started again: {error}")
                    return
                await asyncio.sleep(_PAUSE_S)
            else:
                break
        self._num_restarts += 1
        # The engine has the new decoder before anybody is admitted to it.
        self.on_connected(self.decoder)
        for stage in self._stages:
            assert stage.lease is not None, "a prepared stage has a lease"
            self.pools.restore(stage.stage, stage.lease)
        logger.info("the stages of %s are back", self._model.name)
        for stage in self._stages:
            if stage.state == "lost":  # meanwhile; when this has ended they start once more
                self._loop.call_soon(self._stage_ended, stage, "it was lost while the others started")

    async def _end_stages(self) -> None:
        stages, self._stages = self._stages, []
        await asyncio.gather(*(stage.end() for stage in stages))


def thread_counts(config: RemoraConfig, model: ModelConfig) -> Sequence[int]:
    """Threads that each stage of the model computes with."""
    devices = {device.name: device for device in config.devices}
    return [devices[name].num_threads or len(os.sched_getaffinity(0)) for name in model.stage_devices]
