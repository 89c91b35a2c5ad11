"""What the pool machine's world is made of: namespaces, geometries, replicas and their sequences as they see them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pool_driver import BLOCK_BYTES, small_geometry

from remora.namespaces.commands import Admit, AnyAnswer, AnyCommand, Relocate
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.hashing import kv_fingerprint, sharing_domain
from remora.platform.base.ids import BlockHash, LeaseId, NamespaceId

NUM_EXTENTS = 5
EXTENT_BYTES = 36 * BLOCK_BYTES
DATA_BYTES = NUM_EXTENTS * EXTENT_BYTES
GEOMETRIES = {"m1": small_geometry(1), "m2": small_geometry(2), "m3": small_geometry(4)}
#: Another precision of m1, for one namespace.
WIDE = GEOMETRIES["m1"].with_precision(("fp32", "fp32"))
BY_ID = {geometry.geometry_id: geometry for geometry in (*GEOMETRIES.values(), WIDE)}
FINGERPRINTS = {
    geometry.geometry_id: kv_fingerprint(geometry, model, "t")
    for model, geometry in (*GEOMETRIES.items(), ("m1", WIDE))
}


@dataclass
class Spec:
    model: str
    tenant: str
    share_group: str
    guaranteed: int
    limit: int
    weight: float
    kv_precision: KVPrecision | None = None

    @property
    def geometry(self) -> KVGeometry:
        own = GEOMETRIES[self.model]
        return own if self.kv_precision is None else own.with_precision(self.kv_precision)

    def domain(self, name: str) -> str:
        return sharing_domain(NamespaceId(name), self.tenant, self.share_group)


#: Guarantees need 1 + 1 + 2 of the 5 extents.
SPECS = {
    "alone": Spec("m1", "", "", EXTENT_BYTES // 2, DATA_BYTES, 1.0),
    "alone/a": Spec("m1", "", "", EXTENT_BYTES // 4, DATA_BYTES, 1.0),
    "alone/b": Spec("m1", "", "", 0, 24 * BLOCK_BYTES, 2.0),
    "group-a": Spec("m1", "t", "g", EXTENT_BYTES // 4, DATA_BYTES, 2.0),
    "group-b": Spec("m1", "t", "g", 0, 40 * BLOCK_BYTES, 1.0),
    "group-wide": Spec("m1", "t", "g", 0, 60 * BLOCK_BYTES, 1.0, WIDE.kv_precision),
    "two": Spec("m2", "t", "g", EXTENT_BYTES, DATA_BYTES, 1.0),
    "three": Spec("m3", "", "", 2 * EXTENT_BYTES, DATA_BYTES, 0.5),
}


@dataclass
class Running:
    admit: Admit
    blocks: list[int]
    tokens: list[int]
    hashes: list[BlockHash]
    num_published: int
    preempted: bool = False
    #: Blocks that are being copied, with what they held, until that is settled.
    sources: dict[int, list[object]] = field(default_factory=dict)


@dataclass
class Client:
    """A replica's own view."""

    lease_id: LeaseId
    model: str
    call_no: int = 1
    event_no: int = 0
    calls: list[tuple[AnyCommand, AnyAnswer]] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    waiting: dict[str, Admit] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    #: Heard and not done yet; and the last that was done.
    relocations: list[Relocate] = field(default_factory=list)
    relocated_no: int = 0


def units(block: int, block_bytes: int) -> range:
    size = block_bytes // BLOCK_BYTES
    return range(block * size, (block + 1) * size)
