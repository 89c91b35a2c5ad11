"""A pool's whole state as bytes, and back. Equal states give equal bytes: order is kept only where it means something.

Derived things (index entries, children, counts, free masks) are rebuilt from block records.
"""

from __future__ import annotations

import zlib

import msgspec

from remora.namespaces.blocks import Block
from remora.namespaces.commands import Admit, AnyAnswer, AnyEvent, Attach, Attached, Quota, SetQuota
from remora.namespaces.extents import GeometrySpace
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.holds import HeldChain
from remora.namespaces.leases import Lease
from remora.namespaces.pool_parts import PoolParts, PoolStateConfig
from remora.namespaces.positions import Runs
from remora.namespaces.prefix_index import RealmKey
from remora.namespaces.relocation import Place, Relocation
from remora.namespaces.sequences import Claim, Sequence
from remora.namespaces.waiting import Blocked, Parked
from remora.platform.base.errors import JournalError
from remora.platform.base.ids import BlockHash, Epoch, HoldId, LeaseId, ModelId, NamespaceId, SequenceId, SessionId

_MAGIC = b"remora-pool-snapshot-7\n"


class _Record(msgspec.Struct, frozen=True, array_like=True):
    pass


class _Block(_Record, frozen=True, array_like=True):
    index: int
    namespace_order: int
    refs: int
    realm_no: int = -1
    block_hash: BlockHash = BlockHash(b"")
    parent: int = -1
    #: Block.uses, stamp, rank and level.
    notes: tuple[int, int, int, int] = (0, 0, 0, 0)


class _Space(_Record, frozen=True, array_like=True):
    geometry: KVGeometry
    blocks: list[_Block]


class _Extent(_Record, frozen=True, array_like=True):
    space_order: int
    last_domains: list[int]
    residue: list[int]


class _Namespace(_Record, frozen=True, array_like=True):
    namespace_id: NamespaceId
    model_id: ModelId
    quota: Quota
    tenant: str
    share_group: str
    counters: tuple[int, int, int, int]
    evicted_blocks: dict[str, int]
    #: EvictionPolicy.dump of each holding, by the order of its space.
    policies: dict[int, bytes]
    adviser: bytes
    kv_precision: KVPrecision | None = None


class _Sequence(_Record, frozen=True, array_like=True):
    admit: Admit
    admitted_no: int
    blocks: list[int]
    num_cached: int
    hashes: list[BlockHash]
    anchors: dict[int, int]
    preempted: bool
    claim: Claim
    num_bound: int
    runs: Runs
    sources: list[int]


class _Lease(_Record, frozen=True, array_like=True):
    attach: Attach
    attached: Attached
    last_call_no: int
    answers: dict[int, AnyAnswer]
    events: list[AnyEvent]
    next_event_no: int
    finished: list[SequenceId]
    sequences: list[_Sequence]
    relocations: list[int]
    #: Beyond that of the attach.
    formats: list[tuple[KVGeometry, bytes]] = []


class _Relocation(_Record, frozen=True, array_like=True):
    space_order: int
    #: -1: the block is gone.
    block: int
    other: int
    started_s: float
    waiting: dict[LeaseId, int]
    #: Of a private block that is still there: sequence and position.
    admitted_no: int = -1
    position: int = -1


class _HeldChain(_Record, frozen=True, array_like=True):
    hold_id: HoldId
    space_order: int
    blocks: list[int]
    until_s: float


class _Pool(_Record, frozen=True, array_like=True):
    config: PoolStateConfig
    spaces: list[_Space]
    extents: list[_Extent]
    domains: list[str]
    namespaces: list[_Namespace]
    realms: list[tuple[int, bytes, int]]
    model_spaces: dict[ModelId, int]
    leases: list[_Lease]
    ended: list[tuple[LeaseId, int, AnyAnswer | None]]
    generations: list[int]
    next_admitted_no: int
    #: Order number, admission, bytes that passed it.
    parked: list[tuple[int, Admit, int]]
    next_order_no: int
    blocked: Blocked
    sessions: list[tuple[SessionId, Epoch]]
    session_tails: dict[SessionId, tuple[RealmKey, BlockHash]]
    relocations: list[_Relocation]
    holds: list[_HeldChain]
    gathered_s: float
    now_s: float


_DECODER = msgspec.msgpack.Decoder(_Pool)


def encode_snapshot(parts: PoolParts) -> bytes:
    """Magic with version, CRC-32 of the rest, the rest."""
    body = msgspec.msgpack.encode(_freeze(parts))
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def decode_snapshot(data: bytes) -> PoolParts:
    """Raises JournalError for bytes that are damaged or of another version."""
    head = len(_MAGIC) + 4
    if data[: len(_MAGIC)] != _MAGIC:
        raise JournalError(f"not a pool snapshot of this version: it starts with {data[: len(_MAGIC)]!r}")
    body = data[head:]
    if zlib.crc32(body) != int.from_bytes(data[len(_MAGIC) : head], "little"):
        raise JournalError("the pool snapshot is damaged: its checksum does not match")
    try:
        return _thaw(_DECODER.decode(body))
    except (msgspec.MsgspecError, LookupError) as error:
        raise JournalError(f"the pool snapshot cannot be read: {error}") from error


def _freeze(parts: PoolParts) -> _Pool:
    spaces = list(parts.extents.spaces.values())
    realms = sorted(key for key, realm in parts.index.realms.items() if realm.blocks)
    realm_nos = {key: number for number, key in enumerate(realms)}
    space_orders = {space.geometry_id: space.order for space in spaces}
    return _Pool(
        config=parts.config,
        spaces=[_Space(space.geometry, _freeze_blocks(space, realm_nos)) for space in spaces],
        extents=[
            _Extent(e.space.order if e.space is not None else -1, e.last_domains, sorted(e.residue))
            for e in parts.extents.extents
        ],
        domains=list(parts.book.domains),
        namespaces=[
            _Namespace(
                n.namespace_id, n.model_id, n.quota, n.tenant, n.share_group,
                (n.lookup_tokens, n.hit_tokens, n.num_admitted, n.num_preempted),
                dict(sorted(n.evicted_blocks.items())),
                {space.order: n.holdings[space.geometry_id].policy.dump()
                 for space in spaces if space.geometry_id in n.holdings},
                n.adviser.dump(), n.kv_precision,
            )
            for n in parts.book.namespaces.values()
        ],
        realms=[(space_orders[key.geometry_id], key.fingerprint, key.domain) for key in realms],
        model_spaces={model: space.order for model, space in sorted(parts.book.model_spaces.items())},
        leases=[_freeze_lease(lease) for lease in parts.leases.leases.values()],
        ended=[(lease_id, *ending) for lease_id, ending in parts.leases.ended.items()],
        generations=parts.leases.generations,
        next_admitted_no=parts.running.next_no,
        parked=[(p.order_no, p.admit, p.passed_bytes) for p in sorted(parts.room, key=lambda parked: parked.order_no)],
        next_order_no=parts.room.next_order_no,
        blocked=parts.room.blocked,
        sessions=list(parts.sessions.highest.items()),
        session_tails=parts.sessions.tails,
        relocations=[_freeze_relocation(move) for move in parts.relocations.moves],
        holds=[
            _HeldChain(hold_id, held.space.order, [block.index for block in held.blocks], held.until_s)
            for hold_id, held in parts.holds.chains.items()
        ],
        gathered_s=parts.relocations.gathered_s,
        now_s=parts.now_s,
    )  # fmt: skip


def _freeze_blocks(space: GeometrySpace, realm_nos: dict[RealmKey, int]) -> list[_Block]:
    records = []
    for extent in space.extents.values():
        for block in extent.blocks.values():
            order = block.holding.namespace.order
            notes = (block.uses, block.stamp, block.rank, block.level)
            if block.block_hash is None or block.realm is None:
                records.append(_Block(block.index, order, block.refs, notes=notes))
            else:
                parent = block.parent.index if block.parent is not None else -1
                realm_no = realm_nos[block.realm.key]
                records.append(_Block(block.index, order, block.refs, realm_no, block.block_hash, parent, notes))
    return sorted(records, key=lambda record: record.index)


def _freeze_relocation(move: Relocation) -> _Relocation:
    block, place = move.block, move.place
    is_there = block is not None and block.extent.blocks.get(block.index) is block
    space_order = move.extent.space.order if move.extent.space is not None else -1
    waiting = dict(sorted(move.waiting.items()))
    frozen = _Relocation(space_order, block.index if block and is_there else -1, move.index, move.started_s, waiting)
    if place is None or block is None or not place.holds(block):
        return frozen
    return msgspec.structs.replace(frozen, admitted_no=place.sequence.admitted_no, position=place.position)


def _freeze_lease(lease: Lease) -> _Lease:
    sequences = [
        _Sequence(
            s.admit, s.admitted_no, [block.index for block in s.blocks], s.num_cached, s.hashes,
            {position: block.index for position, block in sorted(s.anchors.items())}, s.preempted, s.claim,
            s.num_bound, s.runs, [block.index for block in s.sources],
        )
        for s in lease.sequences.values()
    ]  # fmt: skip
    return _Lease(
        lease.attach, lease.attached, lease.last_call_no, lease.answers, list(lease.events), lease.next_event_no,
        list(lease.finished), sequences, sorted(lease.relocations),
        [(space.geometry, fingerprint) for space, fingerprint in lease.formats.values() if space is not lease.space],
    )  # fmt: skip


def _thaw(pool: _Pool) -> PoolParts:
    parts = PoolParts(pool.config)
    book, ledger = parts.book, parts.ledger
    spaces = [parts.extents.space_of(record.geometry) for record in pool.spaces]
    for extent, record in zip(parts.extents.extents, pool.extents, strict=True):
        if record.space_order >= 0:
            parts.extents.lease(extent, spaces[record.space_order])
        extent.last_domains = list(record.last_domains)
        extent.residue = set(record.residue)
    book.domains = {name: number for number, name in enumerate(pool.domains, 1)}
    book.model_spaces = {model: spaces[order] for model, order in pool.model_spaces.items()}
    namespaces = []
    for entry in pool.namespaces:
        command = SetQuota(
            lease_id=LeaseId(""), namespace_id=entry.namespace_id, model_id=entry.model_id, quota=entry.quota,
            tenant=entry.tenant, share_group=entry.share_group, kv_precision=entry.kv_precision,
        )  # fmt: skip
        namespace = book.add(command)
        counters = entry.counters
        namespace.lookup_tokens, namespace.hit_tokens, namespace.num_admitted, namespace.num_preempted = counters
        namespace.evicted_blocks = dict(entry.evicted_blocks)
        namespace.adviser.load(entry.adviser)
        namespaces.append(namespace)
    book.refresh_guarantees()
    realms = [
        parts.index.realm(RealmKey(spaces[order].geometry_id, fingerprint, domain))
        for order, fingerprint, domain in pool.realms
    ]
    blocks: list[dict[int, Block]] = []
    for space, space_record in zip(spaces, pool.spaces, strict=True):
        extents = {
            index: extent
            for extent in space.extents.values()
            for index in range(extent.first_block, extent.first_block + extent.num_blocks)
        }
        found: dict[int, Block] = {}
        for item in space_record.blocks:
            namespace, extent = namespaces[item.namespace_order], extents[item.index]
            holding = ledger.holding(namespace, space)
            block = found[item.index] = Block(item.index, extent, holding)
            extent.free_mask &= ~(1 << (item.index - extent.first_block))
            space.put(extent, block)
            block.refs = item.refs
            block.uses, block.stamp, block.rank, block.level = item.notes
            if item.refs:
                extent.num_referenced += 1
                ledger.num_referenced += 1
                holding.used_blocks += 1
                namespace.charge(space.block_bytes, 0)
            else:
                namespace.charge(0, space.block_bytes)
        for item in space_record.blocks:
            if item.realm_no >= 0:
                parent = found[item.parent] if item.parent >= 0 else None
                ledger.seal(found[item.index], realms[item.realm_no], item.block_hash, parent)
        blocks.append(found)
    for namespace, entry in zip(namespaces, pool.namespaces, strict=True):
        for order, dump in entry.policies.items():
            ledger.holding(namespace, spaces[order]).policy.load(dump, blocks[order])
    running = [sequence for record in pool.leases for sequence in _thaw_lease(parts, record, blocks)]
    for sequence in sorted(running, key=lambda sequence: sequence.admitted_no):
        parts.running.add(sequence)
    for moved in pool.relocations:
        space = spaces[moved.space_order]
        extent = parts.extents.extents[moved.other * space.block_bytes // pool.config.extent_bytes]
        extent.free_mask &= ~(1 << (moved.other - extent.first_block))
        space.reserve(extent, moved.other)
        user = parts.running.sequences.get(moved.admitted_no)
        parts.relocations.moves.append(
            Relocation(
                blocks[moved.space_order].get(moved.block), extent, moved.other, moved.started_s, dict(moved.waiting),
                Place(user, moved.position) if user is not None else None,
            )
        )  # fmt: skip
    for held in pool.holds:
        chain = [blocks[held.space_order][index] for index in held.blocks]
        parts.holds.chains[held.hold_id] = HeldChain(spaces[held.space_order], chain, held.until_s)
    parts.leases.ended = {lease_id: (call_no, answer) for lease_id, call_no, answer in pool.ended}
    parts.leases.generations = list(pool.generations)
    for order_no, admit, passed_bytes in pool.parked:
        namespace = book.namespaces[admit.namespace_id]
        parts.room.add(Parked(admit, parts.leases.leases[admit.lease_id], namespace, order_no, passed_bytes))
    parts.running.next_no = pool.next_admitted_no
    parts.room.next_order_no = pool.next_order_no
    parts.room.blocked = pool.blocked
    parts.sessions.highest.update(pool.sessions)
    parts.sessions.tails.update(pool.session_tails)
    parts.relocations.gathered_s = pool.gathered_s
    parts.now_s = pool.now_s
    return parts


def _thaw_lease(parts: PoolParts, record: _Lease, blocks: list[dict[int, Block]]) -> list[Sequence]:
    """Restores a lease; its sequences still have to be listed as running, in order of admission."""
    space = parts.extents.space_of(record.attach.geometry)
    lease = Lease(record.attach, record.attached, space)
    lease.last_call_no = record.last_call_no
    lease.answers = dict(record.answers)
    lease.events.extend(record.events)
    lease.next_event_no = record.next_event_no
    lease.finished = dict.fromkeys(record.finished)
    lease.relocations = set(record.relocations)
    parts.leases.leases[record.attach.lease_id] = lease
    for geometry, fingerprint in record.formats:
        lease.add_format(parts.extents.space_of(geometry), fingerprint)
    for item in record.sequences:
        namespace = parts.book.namespaces[item.admit.namespace_id]
        space = lease.space_of(item.admit)
        own = blocks[space.order]
        sequence = Sequence(item.admit, item.admitted_no, namespace, space, parts.realm(lease, space, namespace))
        sequence.blocks = [own[index] for index in item.blocks]
        sequence.num_cached = item.num_cached
        sequence.hashes = list(item.hashes)
        sequence.anchors = {position: own[index] for position, index in item.anchors.items()}
        sequence.preempted = item.preempted
        sequence.claim = item.claim
        sequence.num_bound = item.num_bound
        sequence.runs = item.runs
        sequence.sources = [own[index] for index in item.sources]
        lease.sequences[item.admit.sequence_id] = sequence
    return list(lease.sequences.values())
