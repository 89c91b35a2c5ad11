"""Putting the stages of a pipeline together: which transports, the channels, the loops."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray

from remora.cache_actors.port import StepGate
from remora.cache_actors.process_watch import process_identity
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.pipeline.base import StageCard, StageTables
from remora.deployments.pipeline.hops import (
    choose_transports,
    open_receiver,
    open_sender,
    own_place,
    result_room_bytes,
)
from remora.deployments.pipeline.pipeline_decoder import PipelineDecoder, PipelineLimits
from remora.kernels.stages import stage_decoder
from remora.platform.base.errors import RemoraError, StageLost

logger = logging.getLogger(__name__)

#: Longest time that the workers may take to open their channels.
_CONNECT_TIMEOUT_S = 30.0


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
    ConfigError when there is no transport between their nodes.
    """
    node_ids = [ray.get_runtime_context().get_node_id(), *(card.node_id for card in cards)]
    kinds = choose_transports(node_ids)
    for stage, kind in enumerate(kinds):
        there = (stage + 1) % limits.num_stages
        logger.info(
            "model %s: from stage %d on node %s to stage %d on node %s by %s",
            *(model.name, stage, node_ids[stage][:8], there, node_ids[there][:8], kind),
        )
    processes = [process_identity(), *(card.process for card in cards)]
    receiver, own_address = open_receiver(
        kinds[-1], limits, from_stage=len(workers), peer=processes[-1], place=own_place(cluster_name)
    )
    sender = None
    try:
        # Every stage opens the end that it reads from, and is then told where the next one reads.
        addresses = ray.get(
            [
                worker.open_receiver.remote(kinds[stage], limits, processes[stage], cluster_name)
                for stage, worker in enumerate(workers)
            ],
            timeout=_CONNECT_TIMEOUT_S,
        )
        sender = open_sender(addresses[0])
        calls = [
            worker.connect.remote(address, limits)
            for worker, address in zip(workers, [*addresses[1:], own_address], strict=True)
        ]
        ray.get(calls, timeout=_CONNECT_TIMEOUT_S)
    except (ray.exceptions.RayError, RemoraError, TimeoutError) as error:
        receiver.close()
        if sender is not None:
            sender.close()
        raise StageLost(f"model {model.name!r}: a stage cannot be connected: {error}") from None
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
