"""What replicas and a pool actor say to each other, as bytes (msgpack), beside the commands themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from remora.cache_actors.port import HeldThere
from remora.namespaces.commands import AnyAnswer, AnyCommand, AnyEvent
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.hold_commands import Held
from remora.namespaces.replication import ReplicationReport
from remora.namespaces.report import PoolReport
from remora.platform.base.ids import BlockHash, LeaseId, ModelId, NamespaceId, PoolId


class PoolBinding(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica of the node reaches the memory of the pool, and which device it computes on."""

    pool_id: PoolId
    kind: Literal["cpu", "cuda"]
    #: The arena file; for a cuda pool it holds the header only.
    arena_path: str
    incarnation: int
    #: Which of shared memory and the state directory it lies in, and whether it was adopted from a predecessor.
    backing: Literal["shm", "file", "cuda"]
    outcome: Literal["created", "adopted", "replaced"]
    #: File of the device's step lock.
    step_lock_path: str
    #: UUID of the GPU ("GPU-..."): replicas ask Ray for no GPU and select the pool's by setting CUDA_VISIBLE_DEVICES.
    device_uuid: str = ""
    #: CUDA IPC handle of the allocation.
    ipc_handle: bytes = b""


#: Precision of K and V by namespace; None: that of its model.
KVPrecisions = dict[NamespaceId, KVPrecision | None]


class KVFormats(NamedTuple):
    """What a pool says about the shapes of KV in it."""

    precisions: KVPrecisions
    #: Of everything that may be cached.
    geometries: tuple[KVGeometry, ...]


class CallReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in the order of the commands, and the lease's events so far."""

    answers: tuple[AnyAnswer, ...]
    events: tuple[AnyEvent, ...]
    #: Events may be consequences of calls up to this number: the client delivers those answers first.
    last_call_no: int


class EventsReply(msgspec.Struct, frozen=True, kw_only=True):
    events: tuple[AnyEvent, ...]
    last_call_no: int
    #: False: the pool does not know the lease (any more); no events will come.
    lease_known: bool


class HoldReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader from outside the pool may read, and how it gets there."""

    held: Held
    #: Ray's id of the pool's node: processes there map the arena if it has a path, others ask for the bytes.
    node_id: str
    arena_path: str
    incarnation: int


class ReplicationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A pool asks one of another node to take a copy of a chain of its blocks; that one fetches what it lacks."""

    source_pool_id: PoolId
    source_actor_name: str
    namespace_id: NamespaceId
    model_id: ModelId
    geometry: KVGeometry
    fingerprint: bytes
    #: From the first block on.
    hashes: tuple[BlockHash, ...]
    #: All of them, until the order is answered.
    held: HeldThere
    #: No more than this at once.
    max_blocks: int


class ReplicationReply(msgspec.Struct, frozen=True, kw_only=True):
    #: Leading blocks of the chain that are there now, and how many of them came with this order.
    num_there: int
    num_copied: int = 0
    #: Why not all came that could; "" otherwise.
    problem: str = ""
    #: There is no room or no such namespace: to ask again soon is of no use.
    is_refused: bool = False


class PoolDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A pool for operators."""

    binding: PoolBinding
    report: PoolReport
    #: Seconds since each lease's process was last heard; None: not since the pool's restart.
    silent_s: dict[LeaseId, float | None]
    #: Times a pool actor came back to this arena.
    num_restarts: int
    journal_bytes: int
    pid: int
    #: By namespace whose blocks are copied to other nodes.
    replication: dict[NamespaceId, ReplicationReport] = {}


_encoder = msgspec.msgpack.Encoder()
_commands_decoder = msgspec.msgpack.Decoder(list[AnyCommand])
_call_reply_decoder = msgspec.msgpack.Decoder(CallReply)
_events_reply_decoder = msgspec.msgpack.Decoder(EventsReply)


def encode_commands(commands: Sequence[AnyCommand]) -> bytes:
    return _encoder.encode(list(commands))


def decode_commands(data: bytes) -> list[AnyCommand]:
    """Raises msgspec.DecodeError for anything else."""
    return _commands_decoder.decode(data)


def encode_reply(reply: CallReply | EventsReply) -> bytes:
    return _encoder.encode(reply)


def decode_call_reply(data: bytes) -> CallReply:
    return _call_reply_decoder.decode(data)


def decode_events_reply(data: bytes) -> EventsReply:
    return _events_reply_decoder.decode(data)
