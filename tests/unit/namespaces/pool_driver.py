"""Drives a PoolState the way a replica does: numbers calls, names sequences, hashes prompts."""

from __future__ import annotations

from typing import Any, Literal

from remora.namespaces.commands import (
    AddFormat,
    Admit,
    Admitted,
    AnyAnswer,
    AnyEvent,
    Attach,
    Attached,
    Detach,
    Extend,
    Extended,
    ExtendItem,
    LeaseLost,
    ProcessIdentity,
    Publish,
    Published,
    Quota,
    QuotaSet,
    Release,
    Released,
    Seal,
    SetQuota,
    Tick,
)
from remora.namespaces.effects import Effect
from remora.namespaces.geometry import KVGeometry, KVPrecision, LayerGroup
from remora.namespaces.hashing import chain_hashes, chain_root, kv_fingerprint, sharing_domain
from remora.namespaces.journal import encode_record, read_journal
from remora.namespaces.kept_chains import KeptChain
from remora.namespaces.pool import PoolState, PoolStateConfig
from remora.namespaces.report import NamespaceReport
from remora.platform.base.ids import (
    BlockHash,
    Epoch,
    GeometryId,
    LeaseId,
    ModelId,
    NamespaceId,
    ReplicaId,
    SequenceId,
    SessionId,
)

BLOCK_TOKENS = 4
#: 4 tokens * 2 sides * 1 head * 16 values * 2 bytes.
BLOCK_BYTES = 256


def small_geometry(num_layers: int = 1, *, kv_heads: int = 1) -> KVGeometry:
    """Blocks of 256 bytes for each layer and head."""
    group = LayerGroup(num_layers=num_layers, num_kv_heads=kv_heads, head_dim=16)
    return KVGeometry(groups=(group,), block_tokens=BLOCK_TOKENS)


class Driver:
    """A pool under a clock that moves when told."""

    def __init__(
        self, *, num_extents: int = 2, extent_bytes: int = 16 * BLOCK_BYTES, reserved_bytes: int = 1000, **config: Any
    ) -> None:
        data_bytes = num_extents * extent_bytes
        self.state = PoolState(
            PoolStateConfig(data_bytes=data_bytes, extent_bytes=extent_bytes, reserved_bytes=reserved_bytes, **config)
        )
        self.data_bytes = data_bytes
        #: Set to False where so many calls are made that checking after each takes too long.
        self.is_checked = True
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.tenants: dict[str, tuple[str, str]] = {}
        self._snapshot: bytes | None = None
        self._frames: list[bytes] = []
        #: How the pool dies at the next command, if a journal is kept: after it was journalled, or while.
        self.dies_next: Literal["", "whole", "torn"] = ""

    def apply(self, command: Any) -> AnyAnswer:
        """Applies, keeps the effects, and checks every invariant."""
        if self._snapshot is not None:
            self._frames.append(encode_record(len(self._frames) + 1, command, self.now_s))
        answer = self.state.apply(command, self.now_s)
        self.effects.extend(self.state.take_effects())
        if self._snapshot is not None and self.dies_next:
            self._die(command, answer)
        if self.is_checked:
            self.state.check_integrity()
        return answer

    def quota(
        self,
        name: str,
        *,
        guaranteed: int = 0,
        limit: int | None = None,
        weight: float = 1.0,
        model: str = "m",
        tenant: str = "",
        share_group: str = "",
        kv_precision: KVPrecision | None = None,
    ) -> AnyAnswer:
        """Sets a quota in bytes; no limit: the whole arena."""
        self.tenants[name] = (tenant, share_group)
        limit_bytes = self.data_bytes if limit is None else limit
        return self.apply(
            SetQuota(
                lease_id=LeaseId(""),
                namespace_id=NamespaceId(name),
                model_id=ModelId(model),
                quota=Quota(guaranteed_bytes=guaranteed, limit_bytes=limit_bytes, weight=weight),
                tenant=tenant,
                share_group=share_group,
                kv_precision=kv_precision,
            )
        )

    def namespace(self, name: str, **quota: Any) -> str:
        assert isinstance(self.quota(name, **quota), QuotaSet)
        return name

    def lease(self, name: str = "lease-1", **attach: Any) -> Replica:
        """Attaches and returns the replica; the attach must succeed."""
        replica = Replica(self, name, **attach)
        assert isinstance(replica.attached, Attached), replica.attached
        return replica

    def lose(self, replica: Replica) -> None:
        self.apply(LeaseLost(lease_id=replica.lease_id))

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.apply(Tick(lease_id=LeaseId("")))

    def keep_journal(self) -> None:
        """From now on the pool can die at any command; see `dies_next`."""
        self._snapshot, self._frames = self.state.snapshot(), []

    def _die(self, command: Any, answer: AnyAnswer) -> None:
        """Comes back from snapshot and journal; a command whose record is torn was not answered, and is sent again."""
        expected = self.state.snapshot()
        assert self._snapshot is not None
        journal = b"".join(self._frames)
        if self.dies_next == "torn":
            journal = journal[: -len(self._frames[-1]) // 2]
        self.state = PoolState.restore(self._snapshot)
        for record in read_journal(journal).records:
            self.state.apply(record.command, record.now_s)
            self.state.take_effects()
        if self.dies_next == "torn":
            assert self.state.apply(command, self.now_s) == answer
            self.state.take_effects()
        assert self.state.snapshot() == expected
        self.dies_next = ""
        self.keep_journal()

    def restart(self) -> None:
        """The pool's process dies and comes back from a snapshot."""
        snapshot = self.state.snapshot()
        self.state = PoolState.restore(snapshot)
        assert self.state.snapshot() == snapshot
        self.state.check_integrity()

    def report(self, name: str) -> NamespaceReport:
        return next(n for n in self.state.describe().namespaces if n.namespace_id == name)


class Replica:
    """One lease, and the sequences it runs."""

    def __init__(
        self,
        driver: Driver,
        name: str,
        *,
        model: str = "m",
        geometry: KVGeometry | None = None,
        weights: str = "w",
        reserved: int = 0,
        relocates: bool = False,
    ) -> None:
        self.driver = driver
        self.lease_id = LeaseId(name)
        self.model = model
        self.geometry = geometry or small_geometry()
        self.fingerprint = kv_fingerprint(self.geometry, weights, "tokenizer")
        self.formats: dict[KVPrecision, tuple[GeometryId, bytes]] = {}
        self.call_no = 0
        self.event_no = 0
        self.last: Any = None
        self.attach_command = Attach(
            lease_id=self.lease_id,
            call_no=1,
            replica_id=ReplicaId(f"replica-{name}"),
            model_id=ModelId(model),
            geometry=self.geometry,
            fingerprint=self.fingerprint,
            process=ProcessIdentity(pid=1, start_time_ticks=2, boot_id="boot"),
            reserved_bytes=reserved,
            relocates=relocates,
        )
        self.attached = driver.apply(self.attach_command)
        self.call_no = 1

    def call(self, kind: Any, **fields: Any) -> Any:
        """Sends the lease's next call."""
        self.call_no += 1
        self.last = kind(lease_id=self.lease_id, call_no=self.call_no, **fields)
        return self.driver.apply(self.last)

    def again(self) -> Any:
        """Repeats the last call."""
        return self.driver.apply(self.last)

    def add_format(self, kv_precision: KVPrecision, *, weights: str = "w") -> Any:
        """From now on sequences that are admitted in this precision are what it says."""
        geometry = self.geometry.with_precision(kv_precision)
        self.formats[kv_precision] = geometry.geometry_id, kv_fingerprint(geometry, weights, "tokenizer")
        return self.call(AddFormat, geometry=geometry, fingerprint=self.formats[kv_precision][1])

    def hashes(self, namespace: str, tokens: list[int], kv_precision: KVPrecision | None = None) -> list[BlockHash]:
        domain = sharing_domain(NamespaceId(namespace), *self.driver.tenants[namespace])
        fingerprint = self.fingerprint if kv_precision is None else self.formats[kv_precision][1]
        return chain_hashes(chain_root(fingerprint, domain), tokens, self.geometry.block_tokens)

    def admit(
        self,
        name: str,
        namespace: str,
        tokens: list[int],
        *,
        more_blocks: int = 0,
        max_blocks: int | None = None,
        session: str | None = None,
        epoch: int = 0,
        priority: int = 0,
        deadline_s: float | None = None,
        hashes: list[BlockHash] | None = None,
        kv_precision: KVPrecision | None = None,
        kept: tuple[KeptChain, ...] = (),
    ) -> Any:
        """Asks for the prompt's blocks and `more_blocks`."""
        num_blocks = -(-len(tokens) // self.geometry.block_tokens) + more_blocks
        return self.call(
            Admit,
            sequence_id=SequenceId(name),
            namespace_id=NamespaceId(namespace),
            hashes=tuple(self.hashes(namespace, tokens, kv_precision) if hashes is None else hashes),
            num_tokens=len(tokens),
            num_blocks=num_blocks,
            max_blocks=num_blocks if max_blocks is None else max_blocks,
            session_id=SessionId(session) if session is not None else None,
            epoch=Epoch(epoch),
            priority=priority,
            deadline_s=deadline_s,
            geometry_id=None if kv_precision is None else self.formats[kv_precision][0],
            kept=kept,
        )

    def run(self, name: str, namespace: str, tokens: list[int], **options: Any) -> Admitted:
        """Admits, computes and publishes the full blocks of a prompt."""
        admitted = self.admit(name, namespace, tokens, **options)
        assert isinstance(admitted, Admitted), admitted
        precision = options.get("kv_precision")
        self.publish(name, namespace, tokens, start=admitted.num_cached_blocks, kv_precision=precision)
        return admitted

    def publish(
        self,
        name: str,
        namespace: str,
        tokens: list[int],
        *,
        start: int = 0,
        kv_precision: KVPrecision | None = None,
    ) -> Published:
        hashes = self.hashes(namespace, tokens, kv_precision)
        seals = tuple(
            Seal(sequence_id=SequenceId(name), position=position, block_hash=hashes[position])
            for position in range(start, len(hashes))
        )
        answer = self.call(Publish, seals=seals)
        assert isinstance(answer, Published), answer
        return answer

    def extend(self, *names: str, num_blocks: int = 1) -> Extended:
        items = tuple(ExtendItem(sequence_id=SequenceId(name), num_blocks=num_blocks) for name in names)
        answer = self.call(Extend, items=items)
        assert isinstance(answer, Extended), answer
        return answer

    def release(self, *names: str) -> int:
        answer = self.call(Release, sequence_ids=tuple(SequenceId(name) for name in names))
        assert isinstance(answer, Released), answer
        return answer.num_released

    def cache(self, name: str, namespace: str, tokens: list[int], **options: Any) -> None:
        """Leaves the prompt's full blocks cached."""
        self.run(name, namespace, tokens, **options)
        self.release(name)

    def detach(self) -> Any:
        return self.call(Detach)

    def events(self) -> tuple[AnyEvent, ...]:
        """Events since the last look."""
        events = self.driver.state.events_after(self.lease_id, self.event_no)
        if events:
            self.event_no = events[-1].event_no
        return events


def prompt(num_blocks: float, start: int = 0) -> list[int]:
    """Tokens that fill so many blocks, all different from those with another start."""
    return [start * 1000 + token for token in range(int(num_blocks * BLOCK_TOKENS))]
