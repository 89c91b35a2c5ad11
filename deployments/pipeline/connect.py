"""Putting the stages of a pipeline together: which transport, the channels, the loops."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray

from remora.cache_actors.port import StepGate
from remora.cache_actors.process_watch import process_identity
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.pipeline.base import StageCard, StageTables, TransportKind
from remora.deployments.pipeline.pipeline_decoder import PipelineDecoder, PipelineLimits
from remora.deployments.pipeline.rings import create_rings, open_ring, remove_rings, result_room_bytes
from remora.kernels.stages import stage_decoder
from remora.platform.base.errors import ConfigError, StageLost
from remora.platform.base.paths import SHARED_MEMORY_DIR, shared_memory_prefix

logger = logging.getLogger(__name__)

#: Longest time that a worker may take to open its channels.
_CONNECT_TIMEOUT_S = 30.0


def choose_transport(node_ids: Sequence[str], device_kinds: Sequence[str]) -> TransportKind:
    """How hidden states travel between stages on these nodes and devices.

    Raises ConfigError, naming the way out, for what is not built: GPUs (NCCL, Ray direct transport), several nodes.
    """
    if any(kind != "cpu" for kind in device_kinds):
        raise ConfigError(
            f"stage_devices: stages on devices of kind {sorted({*device_kinds} - {'cpu'})[0]!r} are not served: "
            "hidden states travel through the memory of a CPU, and neither NCCL nor Ray's direct transport between "
            "GPUs is used yet; choose devices of kind cpu"
        )
    if len({*node_ids}) > 1:
        raise ConfigError(
            f"stage_devices: stages on {len({*node_ids})} nodes are not served: hidden states travel through the "
            "shared memory of one node; choose devices of one node"
        )
    return "shared_memory"


def connect_stages(
    model: LoadedModel,
    workers: Sequence[Any],
    cards: Sequence[StageCard],
    *,
    limits: PipelineLimits,
    gate: StepGate,
    tables: StageTables,
    cluster_name: str,
) -> PipelineDecoder:
    """Channels between this process, which has `model`'s stage 0, and the attached workers of stages 1 .. K-1.

    Blocks for some round trips. Raises StageLost when a worker is gone or does not answer; nothing stays behind then.
    """
    node_ids = [ray.get_runtime_context().get_node_id(), *(card.node_id for card in cards)]
    transport = choose_transport(node_ids, ["cpu"] * limits.num_stages)
    logger.info("model %s: %d stages on one node, hidden states by %s", model.name, limits.num_stages, transport)
    paths = create_rings(SHARED_MEMORY_DIR, shared_memory_prefix(cluster_name), limits)
    processes = [process_identity(), *(card.process for card in cards), process_identity()]
    try:
        sender, receiver = open_ring(paths[0], processes[1]), open_ring(paths[-1], processes[-2])
        calls = [
            worker.connect.remote(
                (str(paths[stage - 1]), str(paths[stage])), (processes[stage - 1], processes[stage + 1]), limits
            )
            for stage, worker in enumerate(workers, start=1)
        ]
        ray.get(calls, timeout=_CONNECT_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise StageLost(f"model {model.name!r}: a stage cannot be connected: {error}") from None
    finally:
        # Both ends are mapped: a process that dies leaves no file behind.
        remove_rings(paths)
    return PipelineDecoder(
        stage_decoder(model.decoder),
        model.geometry,
        limits=limits,
        gate=gate,
        tables=tables,
        sender=sender,
        receiver=receiver,
        result_room_bytes=result_room_bytes(receiver, limits),
    )
