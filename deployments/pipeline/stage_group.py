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
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from remora.cache_actors.pool_client import PoolClient
from remora.cache_actors.pool_handles import get_or_create_pool
from remora.cache_actors.port import StepGate
from remora.cache_actors.process_watch import ProcessWatch
from remora.cache_actors.stage_pools import StagePools
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.pipeline.base import StageCard, StageLease
from remora.deployments.pipeline.connect import choose_transport, connect_stages
from remora.deployments.pipeline.pipeline_decoder import PipelineDecoder, PipelineLimits
from remora.deployments.pipeline.stage_worker import StageWorker
from remora.kernels.stages import StagePart
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import RemoraError, StageLost
from remora.platform.base.ids import ModelId, ReplicaId
from remora.platform.base.model_config import ModelConfig

logger = logging.getLogger(__name__)

#: Ray counts CPUs to place processes; what a stage really uses is bounded by the step lock of its device.
_PROCESS_CPUS = 0.01
#: A stage that is silent for so long is lost.
_DEADLINE_S = 60.0
#: Starts after a loss that may fail one after the other before the replica gives up, and the pause between them.
_MAX_ATTEMPTS = 3
_PAUSE_S = 1.0

StageState = Literal["loading", "ready", "lost"]


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, for operators."""

    stage: int
    device: str
    state: StageState
    #: 0 while there is none.
    pid: int
    first_layer: int
    num_layers: int
    #: How often it was started again.
    num_restarts: int


class _Status(NamedTuple):
    state: StageState
    pid: int


class _Stage:
    """One worker with its lease."""

    def __init__(self, stage: int, device: str, actor: Any) -> None:
        self.stage = stage
        self.device = device
        self.actor = actor
        self.card: StageCard | None = None
        self.lease: PoolClient | None = None
        self.state: StageState = "loading"

    @property
    def pid(self) -> int:
        """0 until it is known."""
        return self.card.process.pid if self.card is not None else 0

    async def end(self) -> None:
        """Kills the process, waits until it is gone, gives its lease back."""
        self.state = "lost"
        ray.kill(self.actor)
        if self.card is not None:
            try:
                watch = ProcessWatch(self.card.process)
            except ProcessLookupError:
                pass
            else:
                with watch:
                    await watch.kill_and_wait()
        if self.lease is not None:
            await self.lease.detach()


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
        self._stages: list[_Stage] = []
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
        devices = {device.name: device for device in self._config.devices}
        kinds = [devices[name].kind for name in self._model_config.stage_devices]
        choose_transport([self._node_id] * len(kinds), kinds)
        await self._make_stages()
        leases = [stage.lease for stage in self._stages if stage.lease is not None]
        geometries = [self._model.geometry, *(stage.card.geometry for stage in self._stages if stage.card is not None)]
        self.pools = StagePools([self._lease, *leases], geometries)
        self.decoder = await self._connect()

    def stage_lost(self, reason: str) -> None:
        """From any thread: a stage is gone, so that all start again. Harmless when they are at it."""
        self._loop.call_soon_threadsafe(self._begin_restart, reason)

    def describe(self) -> tuple[StageStatus, ...]:
        """Every stage, the first included."""
        first = _Status("ready", os.getpid())
        known = {stage.stage: _Status(stage.state, stage.pid) for stage in self._stages}
        return tuple(
            StageStatus(
                stage=stage,
                device=device,
                state=here.state,
                pid=here.pid,
                first_layer=sum(self._split[:stage]),
                num_layers=self._split[stage],
                num_restarts=self._num_restarts if stage else 0,
            )
            for stage, device in enumerate(self._model_config.stage_devices)
            for here in [first if stage == 0 else known.get(stage, _Status("lost", 0))]
        )

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
        self._stages = [self._make_worker(stage) for stage in range(1, len(self._split))]
        try:
            await asyncio.gather(*(self._prepare(stage) for stage in self._stages))
        except BaseException as error:
            await self._end_stages()
            cause = getattr(error, "cause", None)
            if isinstance(cause, RemoraError):
                raise cause from None
            if isinstance(error, ray.exceptions.RayError):
                raise StageLost(f"a stage of {self._model.name!r} did not start: {error}") from None
            raise

    def _make_worker(self, stage: int) -> _Stage:
        device = self._model_config.stage_devices[stage]
        actor = (
            ray.remote(StageWorker)
            .options(
                num_cpus=_PROCESS_CPUS,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._node_id, soft=False),
            )
            .remote(self._config, self._model.name, StagePart(split=self._split, stage=stage), device)
        )
        return _Stage(stage, device, actor)

    async def _prepare(self, stage: _Stage) -> None:
        card = stage.card = await stage.actor.load.remote()
        lease = stage.lease = await PoolClient.attach(
            get_or_create_pool(self._config, stage.device, self._node_id),
            replica_id=ReplicaId(f"{self._replica_id}/stage-{stage.stage}"),
            model_id=ModelId(self._model.name),
            geometry=card.geometry,
            fingerprint=card.fingerprint,
            # The process that writes: only when it is gone are its blocks anybody's.
            process=card.process,
            reserved_bytes=card.weights_bytes,
            on_lost=partial(self._lease_lost, stage),
        )
        assert lease.attached is not None, "an attached lease says how"
        await stage.actor.attach.remote(
            StageLease(
                arena_path=lease.binding.arena_path,
                step_lock_path=lease.binding.step_lock_path,
                lease_slot=lease.attached.lease_slot,
                generation=lease.attached.generation,
                incarnation=lease.attached.incarnation,
                weight=self._config.step_weight_of(self._model_config),
            )
        )

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
            stage.state = "ready"
        return decoder

    def _lease_lost(self, stage: _Stage, reason: str) -> None:
        if stage in self._stages and stage.state != "lost":
            stage.state = "lost"
            self._begin_restart(f"stage {stage.stage} on {stage.device}: {reason}")

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

    async def _end_stages(self) -> None:
        stages, self._stages = self._stages, []
        await asyncio.gather(*(stage.end() for stage in stages))


def thread_counts(config: RemoraConfig, model: ModelConfig) -> Sequence[int]:
    """Threads that each stage of the model computes with."""
    devices = {device.name: device for device in config.devices}
    return [devices[name].num_threads or len(os.sched_getaffinity(0)) for name in model.stage_devices]
