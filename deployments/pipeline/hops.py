"""The hops of one pipeline, stage 0 → 1 → ... → K-1 → 0: which transport each takes, and how its two ends meet.

receiver: open_receiver(...) ─► (its end, HopAddress) ─ actor calls ─► sender: open_sender(HopAddress)
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from remora.cache_actors.byte_link import LinkAddress, may_link, node_ip
from remora.cache_actors.process_watch import ProcessWatch, process_identity
from remora.deployments.pipeline.base import TransportKind
from remora.deployments.pipeline.channel import HopReceiver, HopSender
from remora.deployments.pipeline.link_hop import LinkReceiver, LinkSender
from remora.deployments.pipeline.message import forward_bytes, result_bytes
from remora.deployments.pipeline.pipeline_decoder import PipelineLimits
from remora.deployments.pipeline.ring import Ring, message_room
from remora.namespaces.commands import ProcessIdentity
from remora.platform.base.errors import ConfigError, StageLost
from remora.platform.base.paths import SHARED_MEMORY_DIR, shared_memory_prefix

#: Micro-batches that may wait between two stages: more do not make a pipeline faster, only fuller.
_NUM_WAITING = 3


class HopAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the sender of a hop finds its receiver."""

    #: Who made it, for a ring.
    process: ProcessIdentity
    #: Of a ring's file, on the node of both.
    path: str = ""
    link: LinkAddress | None = None


class HopPlace(NamedTuple):
    """Where a process opens its receivers."""

    #: Of the files of rings, and how their names begin.
    directory: Path
    prefix: str
    #: Its node's address, for links.
    host: str


def own_place(cluster_name: str) -> HopPlace:
    """This process's; Ray must be initialised."""
    return HopPlace(SHARED_MEMORY_DIR, shared_memory_prefix(cluster_name), node_ip())


def choose_transports(node_ids: Sequence[str]) -> tuple[TransportKind, ...]:
    """How hidden states travel from each of the stages on these nodes to the next; the last one's results to the first.

    Raises ConfigError where Ray encrypts what crosses between nodes.
    """
    kinds: tuple[TransportKind, ...] = tuple(
        "shared_memory" if here == there else "tcp"
        for here, there in zip(node_ids, [*node_ids[1:], *node_ids[:1]], strict=True)
    )
    if "tcp" in kinds and not may_link():
        raise ConfigError(
            f"stage_devices: stages on {len({*node_ids})} nodes are not served with RAY_USE_TLS: hidden states would "
            "cross between them as they are; choose devices of one node"
        )
    return kinds


def open_receiver(
    kind: TransportKind, limits: PipelineLimits, *, from_stage: int, peer: ProcessIdentity, place: HopPlace
) -> tuple[HopReceiver, HopAddress]:
    """The receiving end of the hop from a stage, whose process is `peer`.

    Raises StageLost when there is no memory for it, or the peer is gone.
    """
    is_last = from_stage == limits.num_stages - 1
    max_message_bytes = _largest_result(limits) if is_last else _largest_hidden(limits)
    num_messages = limits.max_in_flight + 1 if is_last else _NUM_WAITING
    me = process_identity()
    if kind == "tcp":
        receiver = LinkReceiver(place.host, max_message_bytes=max_message_bytes, num_messages=num_messages)
        return receiver, HopAddress(process=me, link=receiver.address)
    path = place.directory / f"{place.prefix}stages-{secrets.token_hex(6)}-{from_stage}"
    Ring.create(path, max_message_bytes=max_message_bytes, num_messages=num_messages)
    try:
        ring = open_ring(path, peer)
    except StageLost:
        path.unlink(missing_ok=True)
        raise
    # The sender removes it, if it comes.
    weakref.finalize(ring, path.unlink, missing_ok=True)
    return ring, HopAddress(process=me, path=str(path))


def open_sender(address: HopAddress) -> HopSender:
    """The sending end. Raises StageLost when the receiver is gone."""
    if address.link is not None:
        return LinkSender(address.link)
    path = Path(address.path)
    try:
        return open_ring(path, address.process)
    finally:
        # Both ends are mapped: a process that dies leaves no file behind.
        path.unlink(missing_ok=True)


def result_room_bytes(receiver: HopReceiver, limits: PipelineLimits) -> int:
    """Results that find room on the way back to stage 0 however they come to lie: one may have to start anew."""
    return receiver.capacity - message_room(_largest_result(limits))


def open_ring(path: Path, peer: ProcessIdentity) -> Ring:
    """This process's end of a ring whose other end is the peer's. Raises StageLost when that one is gone already."""
    try:
        watch = ProcessWatch(peer)
    except ProcessLookupError:
        raise StageLost(f"{path}: process {peer.pid} at the other side is gone") from None
    ring = Ring.open(path, peer_lives=lambda: not watch.has_exited())
    weakref.finalize(ring, watch.close)
    return ring


def _largest_hidden(limits: PipelineLimits) -> int:
    return forward_bytes(
        num_stages=limits.num_stages,
        num_sequences=limits.max_num_seqs,
        num_columns=limits.max_blocks,
        num_tokens=min(limits.max_micro_tokens, limits.max_step_tokens),
        hidden_size=limits.hidden_size,
    )


def _largest_result(limits: PipelineLimits) -> int:
    return result_bytes(
        num_stages=limits.num_stages,
        num_sequences=limits.max_num_seqs,
        num_logits=limits.max_num_seqs,
        vocab_size=limits.vocab_size,
    )
