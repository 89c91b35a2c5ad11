"""The registry's state, as a function of its events: which replicas there are, and what changed since a version.

Every mutation goes through `RegistryState.apply(event)`; the version is the number of events applied. Sessions (owner,
epoch, token log) become further events of the same log.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

import msgspec

from remora.namespaces.commands import ProcessIdentity
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import ModelId, NamespaceId, PoolId, ReplicaId

#: starting: not yet asked; ready: takes requests; draining: finishes what it has; lost: silent, may come back.
ReplicaStatus = Literal["starting", "ready", "draining", "lost"]
#: Removals that are remembered for readers that ask for changes; older readers get the complete directory.
_MAX_REMOVALS: Final = 1024


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a router weighs."""

    num_running: int = 0
    num_waiting: int = 0
    #: Tokens of prompts that are not evaluated yet.
    num_pending_tokens: int = 0
    generated_tokens_per_s: float = 0.0
    #: It had nothing to do for its model's `idle_timeout_s`.
    wants_sleep: bool = False


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the directory knows it."""

    replica_id: ReplicaId
    model_id: ModelId
    namespace_ids: tuple[NamespaceId, ...]
    node_id: str
    pool_id: PoolId
    process: ProcessIdentity
    #: How routers reach it; its form is the routers' and replicas' affair (an actor name, a Serve replica id).
    endpoint: str
    fingerprint: bytes
    geometry: KVGeometry
    max_model_len: int
    #: Name of its pool's actor.
    pool_actor_name: str = ""
    #: Decoder.name of its back-end.
    decoder: str = ""
    #: The Serve application that it is part of.
    app_name: str = ""
    status: ReplicaStatus = "starting"
    load: ReplicaLoad = ReplicaLoad()


class ReplicaChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Registered, or anything about it changed."""

    record: ReplicaRecord


class ReplicaRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    replica_id: ReplicaId
    reason: str


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every replica that lived before a restart of the registry had time to register again."""


RegistryEvent = ReplicaChanged | ReplicaRemoved | Settled


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to bring its copy up to `version` of `incarnation`."""

    incarnation: str
    version: int
    changed: tuple[ReplicaRecord, ...]
    removed: tuple[ReplicaId, ...]
    #: `changed` is the whole directory: what is not in it does not exist (if `settled`).
    complete: bool
    #: False for a moment after the registry's start: what is missing may only not have registered again yet.
    settled: bool


class RegistryState:
    """Not thread-safe; owned by the registry actor."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation: Final = incarnation
        self.version = 0
        self.settled = False
        self._records: dict[ReplicaId, ReplicaRecord] = {}
        self._versions: dict[ReplicaId, int] = {}
        self._removals: deque[tuple[int, ReplicaId]] = deque()
        self._forgotten_version = 0

    def apply(self, event: RegistryEvent) -> None:
        """The only way to change the state."""
        self.version += 1
        match event:
            case ReplicaChanged(record=record):
                self._records[record.replica_id] = record
                self._versions[record.replica_id] = self.version
            case ReplicaRemoved(replica_id=replica_id):
                self._records.pop(replica_id, None)
                self._versions.pop(replica_id, None)
                self._removals.append((self.version, replica_id))
                while len(self._removals) > _MAX_REMOVALS:
                    self._forgotten_version, _ = self._removals.popleft()
            case Settled():
                self.settled = True

    def replica(self, replica_id: ReplicaId) -> ReplicaRecord | None:
        return self._records.get(replica_id)

    def replicas(self) -> tuple[ReplicaRecord, ...]:
        """All of them, by id."""
        return tuple(self._records[replica_id] for replica_id in sorted(self._records))

    def changes_since(self, incarnation: str, version: int) -> Changes:
        """What happened after `version`; the complete directory for a reader of another incarnation."""
        complete = incarnation != self.incarnation or version < self._forgotten_version or version > self.version
        since = -1 if complete else version
        return Changes(
            incarnation=self.incarnation,
            version=self.version,
            changed=tuple(record for record in self.replicas() if self._versions[record.replica_id] > since),
            removed=()
            if complete
            else tuple(
                replica_id
                for removed_version, replica_id in self._removals
                if removed_version > since and replica_id not in self._records
            ),
            complete=complete,
            settled=self.settled,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant is broken."""
        if self._records.keys() != self._versions.keys():
            raise IntegrityError("the registry has replicas without a version, or versions without a replica")
        if any(not 0 < version <= self.version for version in self._versions.values()):
            raise IntegrityError("a replica has a version the registry has not reached")
        if any(replica_id != record.replica_id for replica_id, record in self._records.items()):
            raise IntegrityError("a replica is filed under another's id")


class DirectoryCopy:
    """A reader's copy of the directory, fed by `Changes`."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.version = 0
        self._records: dict[ReplicaId, ReplicaRecord] = {}
        #: Known from before the registry's restart and not yet confirmed.
        self._unconfirmed: set[ReplicaId] = set()

    def update(self, changes: Changes) -> None:
        """Applies an answer of `changes_since(self.incarnation, self.version)`."""
        if changes.complete:
            self._unconfirmed = set(self._records)
        for record in changes.changed:
            self._records[record.replica_id] = record
            self._unconfirmed.discard(record.replica_id)
        gone = set(changes.removed)
        if changes.settled:
            gone |= self._unconfirmed
            self._unconfirmed = set()
        for replica_id in gone:
            self._records.pop(replica_id, None)
            self._unconfirmed.discard(replica_id)
        self.incarnation, self.version = changes.incarnation, changes.version

    def replicas(self, model_id: ModelId | None = None) -> tuple[ReplicaRecord, ...]:
        """Replicas of a model (of all models), by id."""
        return tuple(
            self._records[replica_id]
            for replica_id in sorted(self._records)
            if model_id is None or self._records[replica_id].model_id == model_id
        )
