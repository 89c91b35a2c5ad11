"""What a pool says about itself: for /v1/pools, /v1/namespaces and metrics."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from remora.namespaces.adviser import CapacityAdvice
from remora.namespaces.commands import ProcessIdentity
from remora.namespaces.geometry import KVPrecision
from remora.namespaces.pool_parts import PoolParts
from remora.namespaces.quotas import Namespace
from remora.platform.base.ids import BlockHash, GeometryId, LeaseId, ModelId, NamespaceId, ReplicaId


class NamespaceReport(msgspec.Struct, frozen=True, kw_only=True):
    namespace_id: NamespaceId
    model_id: ModelId
    tenant: str
    share_group: str
    guaranteed_bytes: int
    limit_bytes: int
    weight: float
    #: Referenced, and sealed but unreferenced; together what the namespace holds.
    used_bytes: int
    cached_bytes: int
    #: What it holds above its guarantee, with all below it.
    borrowed_bytes: int
    num_running: int
    num_waiting: int
    num_admitted: int
    num_preempted: int
    #: Prompt tokens of admitted sequences, and those of them that were cached.
    lookup_tokens: int
    hit_tokens: int
    #: Blocks by cause; see EvictionCause in namespaces/blocks.py.
    evicted_blocks: dict[str, int]
    #: Of its cache, what was taken back because it was borrowed or because its quota was lowered, since the pool began.
    revoked_bytes: int = 0
    #: The closest namespace above it in the tree, and what it holds together with all below it.
    parent: NamespaceId | None = None
    tree_used_bytes: int = 0
    tree_cached_bytes: int = 0
    #: As set; None: the model's. Below another namespace that one's counts.
    kv_precision: KVPrecision | None = None
    #: What its lookups say about the size it could use.
    advice: CapacityAdvice = CapacityAdvice()


class GeometryReport(msgspec.Struct, frozen=True, kw_only=True):
    geometry_id: GeometryId
    block_bytes: int
    block_tokens: int
    num_extents: int
    num_empty_extents: int
    num_used_blocks: int
    num_free_blocks: int
    #: Of the used ones, those that are the other place of a block on the move.
    num_moving_blocks: int = 0


class LeaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """A live lease. After a restart the shell checks that its process lives; if not, it says LeaseLost."""

    lease_id: LeaseId
    replica_id: ReplicaId
    model_id: ModelId
    geometry_id: GeometryId
    fingerprint: bytes
    process: ProcessIdentity
    lease_slot: int
    generation: int
    reserved_bytes: int
    last_call_no: int
    num_sequences: int
    num_waiting: int


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    data_bytes: int
    extent_bytes: int
    incarnation: int
    num_extents: int
    #: Extents of no geometry.
    num_unleased_extents: int
    used_bytes: int
    cached_bytes: int
    #: Device memory besides KV: the ledger's size, and what leases have reserved.
    reservable_bytes: int
    reserved_bytes: int
    num_referenced_blocks: int
    #: Sequences that were told to go and have not gone.
    num_preempting: int
    namespaces: tuple[NamespaceReport, ...]
    geometries: tuple[GeometryReport, ...]
    leases: tuple[LeaseReport, ...]


def describe_leases(parts: PoolParts) -> tuple[LeaseReport, ...]:
    """All live leases, in order of attachment."""
    return tuple(
        LeaseReport(
            lease_id=lease.attach.lease_id,
            replica_id=lease.attach.replica_id,
            model_id=lease.attach.model_id,
            geometry_id=lease.space.geometry_id,
            fingerprint=lease.attach.fingerprint,
            process=lease.attach.process,
            lease_slot=lease.attached.lease_slot,
            generation=lease.attached.generation,
            reserved_bytes=lease.attach.reserved_bytes,
            last_call_no=lease.last_call_no,
            num_sequences=len(lease.sequences),
            num_waiting=len(lease.parked),
        )
        for lease in parts.leases.leases.values()
    )


def count_blocks(parts: PoolParts, namespace_id: NamespaceId, fingerprint: bytes, hashes: Sequence[BlockHash]) -> int:
    """The longest cached prefix of a chain, in blocks, as a sequence of the namespace would find it."""
    namespace = parts.book.namespaces.get(namespace_id)
    return 0 if namespace is None else len(parts.index.find(fingerprint, namespace.domain, hashes))


def _advise(parts: PoolParts, namespace: Namespace) -> CapacityAdvice:
    space = parts.book.space_of(namespace)
    return namespace.adviser.advice(space.block_bytes if space is not None else 0, parts.now_s)


def _revoked_bytes(parts: PoolParts, namespace: Namespace) -> int:
    """In blocks of its geometry."""
    space = parts.book.space_of(namespace)
    num_blocks = namespace.evicted_blocks.get("borrowed", 0) + namespace.evicted_blocks.get("quota", 0)
    return num_blocks * space.block_bytes if space is not None else 0


def describe_pool(parts: PoolParts) -> PoolReport:
    """A consistent picture; costs a step per namespace, extent list and running sequence."""
    running: dict[NamespaceId, int] = {}
    for sequence in parts.running.sequences.values():
        name = sequence.namespace.namespace_id
        running[name] = running.get(name, 0) + 1
    namespaces = tuple(
        NamespaceReport(
            namespace_id=namespace.namespace_id,
            model_id=namespace.model_id,
            tenant=namespace.tenant,
            share_group=namespace.share_group,
            guaranteed_bytes=namespace.quota.guaranteed_bytes,
            limit_bytes=namespace.quota.limit_bytes,
            weight=namespace.quota.weight,
            used_bytes=namespace.used_bytes,
            cached_bytes=namespace.cached_bytes,
            borrowed_bytes=namespace.borrowed_bytes,
            num_running=running.get(namespace.namespace_id, 0),
            num_waiting=parts.room.waiting_in(namespace),
            num_admitted=namespace.num_admitted,
            num_preempted=namespace.num_preempted,
            lookup_tokens=namespace.lookup_tokens,
            hit_tokens=namespace.hit_tokens,
            evicted_blocks=dict(namespace.evicted_blocks),
            revoked_bytes=_revoked_bytes(parts, namespace),
            parent=namespace.parent.namespace_id if namespace.parent is not None else None,
            tree_used_bytes=namespace.tree_used_bytes,
            tree_cached_bytes=namespace.tree_cached_bytes,
            kv_precision=namespace.kv_precision,
            advice=_advise(parts, namespace),
        )
        for namespace in parts.book.namespaces.values()
    )
    geometries = tuple(
        GeometryReport(
            geometry_id=space.geometry_id,
            block_bytes=space.block_bytes,
            block_tokens=space.geometry.block_tokens,
            num_extents=len(space.extents),
            num_empty_extents=len(space.empty_extents()),
            num_used_blocks=space.num_used,
            num_free_blocks=space.num_free,
            num_moving_blocks=parts.relocations.num_moving(space),
        )
        for space in parts.extents.spaces.values()
    )
    return PoolReport(
        data_bytes=parts.config.data_bytes,
        extent_bytes=parts.config.extent_bytes,
        incarnation=parts.config.incarnation,
        num_extents=len(parts.extents.extents),
        num_unleased_extents=parts.extents.num_unleased,
        used_bytes=sum(namespace.used_bytes for namespace in namespaces),
        cached_bytes=sum(namespace.cached_bytes for namespace in namespaces),
        reservable_bytes=parts.config.reserved_bytes,
        reserved_bytes=parts.leases.reserved_bytes,
        num_referenced_blocks=parts.ledger.num_referenced,
        num_preempting=parts.running.num_preempted,
        namespaces=namespaces,
        geometries=geometries,
        leases=describe_leases(parts),
    )
