"""The rings of one pipeline on one node: stage 0 → 1 → ... → K-1 → 0."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path

from remora.cache_actors.process_watch import ProcessWatch
from remora.deployments.pipeline.message import forward_bytes, result_bytes
from remora.deployments.pipeline.pipeline_decoder import PipelineLimits
from remora.deployments.pipeline.ring import Ring, message_room
from remora.namespaces.commands import ProcessIdentity
from remora.platform.base.errors import StageLost

#: Micro-batches that may wait between two stages: more do not make a pipeline faster, only fuller.
_NUM_WAITING = 3


def create_rings(directory: Path, prefix: str, limits: PipelineLimits) -> list[Path]:
    """Makes the files; number i leads from stage i to the next, the last one back to stage 0.

    Whoever made them removes them as soon as both ends are open: mappings stay. Raises StageLost when there is no
    memory for them, and leaves none behind.
    """
    name = f"{prefix}stages-{secrets.token_hex(6)}"
    paths = [directory / f"{name}-{stage}" for stage in range(limits.num_stages)]
    hidden_bytes = forward_bytes(
        num_stages=limits.num_stages,
        num_sequences=limits.max_num_seqs,
        num_columns=limits.max_blocks,
        num_tokens=min(limits.max_micro_tokens, limits.max_step_tokens),
        hidden_size=limits.hidden_size,
    )
    try:
        for path in paths[:-1]:
            Ring.create(path, max_message_bytes=hidden_bytes, num_messages=_NUM_WAITING)
        Ring.create(paths[-1], max_message_bytes=_largest_result(limits), num_messages=limits.max_in_flight + 1)
    except StageLost:
        remove_rings(paths)
        raise
    return paths


def remove_rings(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def result_room_bytes(ring: Ring, limits: PipelineLimits) -> int:
    """Results that find room in the ring back to stage 0 however they come to lie: one may have to start anew."""
    return ring.capacity - message_room(_largest_result(limits))


def open_ring(path: Path, peer: ProcessIdentity) -> Ring:
    """This process's end of a ring whose other end is the peer's. Raises StageLost when that one is gone already."""
    try:
        watch = ProcessWatch(peer)
    except ProcessLookupError:
        raise StageLost(f"{path}: process {peer.pid} at the other side is gone") from None
    ring = Ring(path, peer_lives=lambda: not watch.has_exited())
    weakref.finalize(ring, watch.close)
    return ring


def _largest_result(limits: PipelineLimits) -> int:
    return result_bytes(
        num_stages=limits.num_stages,
        num_sequences=limits.max_num_seqs,
        num_logits=limits.max_num_seqs,
        vocab_size=limits.vocab_size,
    )
