"""The process of one stage behind the first: a Ray actor with its layers' weights and a thread that computes them.

load ─► StageCard      attach ─► the arena is mapped      connect ─► the loop runs, until a neighbour is gone
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import ray

from remora.cache_actors.arena import Arena, ArenaView
from remora.cache_actors.process_watch import process_identity
from remora.cache_actors.step_lock import StepLock
from remora.deployments.models.load import load_model
from remora.deployments.models.load_target import device_target
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.weight_storage import WeightStorage
from remora.deployments.pipeline.base import StageCard, StageLease, StageStats
from remora.deployments.pipeline.pipeline_decoder import PipelineLimits
from remora.deployments.pipeline.rings import open_ring
from remora.deployments.pipeline.stage_counters import StageCounters
from remora.deployments.pipeline.stage_loop import StageLoop
from remora.kernels.stages import StagePart, stage_decoder
from remora.namespaces.commands import ProcessIdentity
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import StageLost

logger = logging.getLogger(__name__)

#: Exit status of a process whose lease on its memory is lost: as of a replica.
EXIT_LEASE_LOST = 70


class StageWorker:
    """Methods are called by the model's replica, one at a time. Owned by it: Ray ends it with the replica."""

    def __init__(self, config: RemoraConfig, model_name: str, part: StagePart, device_name: str) -> None:
        logging.basicConfig(level=logging.INFO)
        self._cluster = config.cluster
        self._model_config = next(model for model in config.models if model.name == model_name)
        self._device = next(device for device in config.devices if device.name == device_name)
        self._part = part
        self._model: LoadedModel | None = None
        self._arena: Arena | None = None
        self._lease: StageLease | None = None
        self._gate: StepLock | None = None
        self._loop: StageLoop | None = None
        self._thread: threading.Thread | None = None

    def load(self) -> StageCard:
        """Reads the weights of its layers. Raises ModelError."""
        model = self._model = load_model(
            self._model_config,
            block_tokens=self._device.block_tokens,
            num_threads=self._device.num_threads,
            target=device_target(self._device, self._model_config),
            part=self._part,
            storage=WeightStorage.of_cluster(self._cluster, num_threads=self._device.num_threads),
        )
        return StageCard(
            stage=self._part.stage,
            first_layer=self._part.first_layer,
            geometry=model.geometry,
            fingerprint=model.fingerprint,
            weights_bytes=model.reserved_bytes,
            decoder=model.decoder.name,
            process=process_identity(),
            node_id=ray.get_runtime_context().get_node_id(),
        )

    def attach(self, lease: StageLease) -> None:
        """Maps the arena and joins the device's step lock. Raises ArenaError, OSError, StageLost for a lease that does
        not hold any more."""
        self.stop()
        if self._arena is not None:
            self._arena.close()
        if self._gate is not None:
            self._gate.close()
        self._arena = Arena.open(Path(lease.arena_path))
        self._gate = StepLock(Path(lease.step_lock_path), weight=lease.weight)
        self._lease = lease
        if not self._may_write():
            raise StageLost(f"the lease of stage {self._part.stage} on its memory does not hold any more")

    def connect(
        self,
        paths: tuple[str, str],
        neighbours: tuple[ProcessIdentity, ProcessIdentity],
        limits: PipelineLimits,
    ) -> None:
        """Begins to compute: `paths` of the rings from the stage before and to the one behind, which are `neighbours`.

        Raises StageLost when one of them is gone.
        """
        self.stop()
        assert self._model is not None
        assert self._arena is not None
        assert self._gate is not None
        decoder = stage_decoder(self._model.decoder)
        receiver, sender = (open_ring(Path(path), peer) for path, peer in zip(paths, neighbours, strict=True))
        self._loop = StageLoop(
            decoder=decoder,
            part=self._part,
            memory=ArenaView(self._arena, self._model.geometry),
            gate=self._gate,
            receiver=receiver,
            sender=sender,
            batch=limits.make_batch(),
            may_write=self._may_write,
            deadline_s=limits.deadline_s,
        )
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="stage", daemon=True)
        self._thread.start()

    def stats(self) -> StageStats:
        """Counters since `connect`."""
        return self._loop.stats() if self._loop is not None else StageCounters(self._part.stage).stats()

    def stop(self) -> None:
        """Ends the loop after the micro-batch in work."""
        if self._loop is not None and self._thread is not None:
            self._loop.stop()
            self._thread.join()
            self._thread = None

    def _may_write(self) -> bool:
        lease, arena = self._lease, self._arena
        return (
            lease is not None
            and arena is not None
            and arena.header.may_emit(lease.lease_slot, lease.generation, lease.incarnation)
        )

    def _run(self, loop: StageLoop) -> None:
        try:
            logger.info("stage %d waits for its next connection: %s", self._part.stage, loop.run())
        except StageLost as lost:
            # The memory is no longer ours: nothing more may be computed in it.
            logger.critical("stage %d ends: %s", self._part.stage, lost)
            logging.shutdown()
            os._exit(EXIT_LEASE_LOST)
        except Exception:
            # Without its loop the process is of no use; its neighbours notice at once that it is gone.
            logger.exception("stage %d ends", self._part.stage)
            logging.shutdown()
            os._exit(1)
