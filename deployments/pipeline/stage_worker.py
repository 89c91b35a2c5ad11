"""The process of one stage behind the first: a Ray actor with its layers' weights and a thread that computes them.

load ─► StageCard      attach ─► the arena is mapped
open_receiver ─► HopAddress      connect ─► the loop runs, until a neighbour is gone
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import ray

from remora.cache_actors.arena import ArenaView, MappedArena
from remora.cache_actors.arena_place import map_arena
from remora.cache_actors.device_resources import select_gpu
from remora.cache_actors.process_watch import process_identity
from remora.cache_actors.step_lock import StepLock
from remora.deployments.models.load import load_model
from remora.deployments.models.load_target import device_target
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.weight_storage import WeightStorage
from remora.deployments.pipeline.base import StageCard, StageLease, StageStats, TransportKind
from remora.deployments.pipeline.channel import HopReceiver
from remora.deployments.pipeline.hops import HopAddress, open_receiver, open_sender, own_place
from remora.deployments.pipeline.pipeline_decoder import PipelineLimits
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
    """Methods are called by the model's replica, one at a time, `ended` beside them. Owned by it: Ray ends it with the
    replica."""

    def __init__(
        self, config: RemoraConfig, model_name: str, part: StagePart, device_name: str, gpu_uuid: str = ""
    ) -> None:
        """`gpu_uuid`: the GPU of the device's pool on this node."""
        logging.basicConfig(level=logging.INFO)
        self._cluster = config.cluster
        select_gpu(gpu_uuid)
        self._model_config = next(model for model in config.models if model.name == model_name)
        self._device = next(device for device in config.devices if device.name == device_name)
        self._part = part
        self._model: LoadedModel | None = None
        self._arena: MappedArena | None = None
        self._lease: StageLease | None = None
        self._gate: StepLock | None = None
        self._loop: StageLoop | None = None
        self._thread: threading.Thread | None = None
        self._receiver: HopReceiver | None = None
        self._ended = threading.Event()
        self._reason = ""

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
        self._arena = map_arena(Path(lease.arena_path), lease.ipc_handle)
        self._gate = StepLock(Path(lease.step_lock_path), weight=lease.weight)
        self._lease = lease
        if not self._may_write():
            raise StageLost(f"the lease of stage {self._part.stage} on its memory does not hold any more")

    def open_receiver(
        self, kind: TransportKind, limits: PipelineLimits, peer: ProcessIdentity, cluster_name: str
    ) -> HopAddress:
        """Where the stage before, whose process is `peer`, sends its hidden states. Raises StageLost without it."""
        self.stop()
        self._receiver, address = open_receiver(
            kind, limits, from_stage=self._part.stage - 1, peer=peer, place=own_place(cluster_name)
        )
        return address

    def connect(self, address: HopAddress, limits: PipelineLimits) -> None:
        """Begins to compute what comes to the receiver, and to send it there.

        Raises StageLost when the stage behind is gone.
        """
        assert self._model is not None
        assert self._arena is not None
        assert self._gate is not None
        assert self._receiver is not None
        decoder = stage_decoder(self._model.decoder)
        sender = open_sender(address)
        self._loop = StageLoop(
            decoder=decoder,
            part=self._part,
            memory=ArenaView(self._arena, self._model.geometry),
            gate=self._gate,
            receiver=self._receiver,
            sender=sender,
            batch=limits.make_batch(),
            may_write=self._may_write,
            deadline_s=limits.deadline_s,
        )
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="stage", daemon=True)
        self._thread.start()

    def ended(self) -> str:
        """Waits until the stage computes no more since `connect`, and says why. Beside the other methods."""
        self._ended.wait()
        return self._reason

    def stats(self) -> StageStats:
        """Counters since `connect`."""
        return self._loop.stats() if self._loop is not None else StageCounters(self._part.stage).stats()

    def stop(self) -> None:
        """Ends the loop after the micro-batch in work."""
        if self._loop is not None and self._thread is not None:
            self._loop.stop()
            self._thread.join()
            self._thread = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _may_write(self) -> bool:
        lease, arena = self._lease, self._arena
        return (
            lease is not None
            and arena is not None
            and arena.header.may_emit(lease.lease_slot, lease.generation, lease.incarnation)
        )

    def _run(self, loop: StageLoop) -> None:
        try:
            self._reason = loop.run()
            logger.info("stage %d waits for its next connection: %s", self._part.stage, self._reason)
            self._ended.set()
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
