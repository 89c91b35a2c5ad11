"""The parts of a pool's state, and what several of its operations share."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from remora.namespaces.blocks import BlockLedger
from remora.namespaces.eviction import make_policy
from remora.namespaces.extents import ExtentMap, GeometrySpace
from remora.namespaces.hold_commands import MAX_HOLD_S, Held, Hold
from remora.namespaces.holds import Holds
from remora.namespaces.leases import Lease, LeaseBook
from remora.namespaces.placement import Placement
from remora.namespaces.prefix_index import PrefixIndex, Realm, RealmKey
from remora.namespaces.quotas import Namespace, QuotaBook
from remora.namespaces.relocation import Relocations
from remora.namespaces.sequences import RunningTable, Sequence
from remora.namespaces.waiting import WaitingRoom
from remora.platform.base.errors import ConfigError, IntegrityError
from remora.platform.base.ids import BlockHash, Epoch, SessionId

#: Blocks of a geometry that every extent must hold, or the geometry cannot attach.
MIN_EXTENT_BLOCKS = 8
#: The capacity adviser looks at sizes up to so many times the arena.
_ADVISED_ARENAS = 4
#: Sessions whose highest epoch is remembered.
MAX_SESSIONS = 262_144


class PoolStateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool is made of; checked when the pool is built."""

    #: Bytes of the arena that hold blocks; what does not fill an extent stays unused.
    data_bytes: int
    extent_bytes: int
    #: Memory of the device besides KV that leases may reserve together.
    reserved_bytes: int
    #: Changes when the arena's bytes are lost; leases of another incarnation are void.
    incarnation: int = 1
    eviction: str = "value"
    #: Generation words in the arena's header.
    max_leases: int = 256

    def check(self) -> None:
        """Raises ConfigError with the name, the value and what is allowed."""
        for name in ("data_bytes", "extent_bytes", "max_leases"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not allowed; at least 1")
        if self.reserved_bytes < 0:
            raise ConfigError(f"reserved_bytes: {self.reserved_bytes} is not allowed; at least 0")
        if self.data_bytes < self.extent_bytes:
            raise ConfigError(f"data_bytes: {self.data_bytes} is less than one extent of {self.extent_bytes} bytes")
        make_policy(self.eviction)


class SessionEpochs:
    """Highest epoch seen of each session; the least recently seen sessions are forgotten first."""

    def __init__(self) -> None:
        self.highest: OrderedDict[SessionId, Epoch] = OrderedDict()
        #: Last sealed block of each session's last sequence, as far as one is remembered.
        self.tails: dict[SessionId, tuple[RealmKey, BlockHash]] = {}

    def is_stale(self, session_id: SessionId | None, epoch: Epoch) -> bool:
        return session_id is not None and epoch < self.highest.get(session_id, epoch)

    def see(self, session_id: SessionId, epoch: Epoch) -> bool:
        """Records an epoch that is not stale; True if it is newer than one seen before."""
        before = self.highest.get(session_id)
        self.highest[session_id] = epoch
        self.highest.move_to_end(session_id)
        if len(self.highest) > MAX_SESSIONS:
            forgotten, _ = self.highest.popitem(last=False)
            self.tails.pop(forgotten, None)
        return before is not None and epoch > before


class PoolParts:
    """Everything a pool consists of. PoolState owns it; the operations change it."""

    def __init__(self, config: PoolStateConfig) -> None:
        config.check()
        self.config = config
        self.extents = ExtentMap(config.data_bytes, config.extent_bytes)
        self.book = QuotaBook(self.extents)
        self.index = PrefixIndex()
        self.ledger = BlockLedger(self.index, self.book, config.eviction)
        self.placement = Placement(self.extents, self.book, self.ledger)
        self.leases = LeaseBook(config.max_leases)
        self.holds = Holds(self.ledger)
        self.running = RunningTable(self.holds)
        self.room = WaitingRoom()
        self.relocations = Relocations(self.ledger, self.leases, self.running, self.holds)
        self.sessions = SessionEpochs()
        #: Time of the last command.
        self.now_s = 0.0

    def realm(self, lease: Lease, space: GeometrySpace, namespace: Namespace) -> Realm:
        """Where the lease's sequences of one format look for this namespace's blocks and publish them."""
        geometry_id = space.geometry_id
        return self.index.realm(RealmKey(geometry_id, lease.formats[geometry_id].fingerprint, namespace.domain))

    def preempt(self, sequence: Sequence, reason: str) -> None:
        """Tells the sequence's lease to release it; said once."""
        if not sequence.preempted:
            lease = self.leases.leases[sequence.lease_id]
            lease.tell_preempt(sequence.admit.sequence_id, reason)
        self.running.preempt(sequence)

    def finish(self, lease: Lease, sequence: Sequence) -> None:
        """Drops a running sequence and leaves a tombstone."""
        self.running.remove(sequence)
        if not sequence.admit.background:
            horizon_blocks = _ADVISED_ARENAS * sequence.space.max_arena_blocks
            sequence.namespace.adviser.touch(sequence.hashes, self.now_s, horizon_blocks)
        session_id = sequence.admit.session_id
        if session_id is not None and session_id in self.sessions.highest and sequence.hashes:
            self.sessions.tails[session_id] = (sequence.realm.key, sequence.hashes[-1])
        sequence.release(self.ledger)
        del lease.sequences[sequence.admit.sequence_id]
        lease.bury(sequence.admit.sequence_id)

    def hold(self, command: Hold) -> Held:
        """Holds the longest cached prefix of a chain, as a sequence of the namespace would find it."""
        namespace = self.book.namespaces.get(command.namespace_id)
        chain = self.holds.chains.get(command.hold_id)
        if chain is None and namespace is not None:
            self.holds.expire(self.now_s)
            found = self.index.find(command.fingerprint, namespace.domain, command.hashes)
            found = found[: self.relocations.num_settled(found)]
            until_s = self.now_s + min(max(command.hold_s, 0.0), MAX_HOLD_S)
            chain = self.holds.begin(command.hold_id, found, until_s)
        return Held() if chain is None else chain.describe()

    def end_session(self, session_id: SessionId) -> None:
        """Cached blocks that only this session used are the first to go from now on, if the policy heeds it."""
        realm_key, block_hash = self.sessions.tails.pop(session_id, (None, b""))
        realm = self.index.realms.get(realm_key) if realm_key is not None else None
        tail = realm.blocks.get(BlockHash(block_hash)) if realm is not None else None
        if tail is not None:
            self.ledger.retire(tail)

    def trim_to_limits(self) -> None:
        """A limit that was lowered below what is in use takes hold as soon as that becomes cache."""
        for namespace in self.book.namespaces.values():
            if namespace.tree_cached_bytes and namespace.tree_held_bytes > namespace.quota.limit_bytes:
                self.placement.trim(namespace, namespace.quota.limit_bytes)

    def check_integrity(self) -> None:
        """Raises IntegrityError when any two parts disagree."""
        for part in (self.extents, self.book, self.index, self.ledger, self.leases, self.holds, self.running,
                     self.room, self.relocations):  # fmt: skip
            part.check_integrity()
        for namespace in self.book.namespaces.values():
            above_limit = namespace.tree_held_bytes > namespace.quota.limit_bytes
            if above_limit and self.placement.giver_below(namespace) is not None:
                raise IntegrityError(f"namespace {namespace.namespace_id} caches blocks above its limit")
