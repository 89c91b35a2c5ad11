"""The protocol between replicas and a pool: commands in, answers out, events behind.

Every command of a lease carries the lease's next `call_no`. The pool applies commands in order, answers a repeated
number with the stored answer, and journals each command before it answers, so that a command takes effect once and
whole, also across a crash of either side. Commands are pure data; `PoolState.apply` is a function of the state, the
command and the time.

    Attach ─► Attached                       Publish ─► Published
    Admit  ─► Admitted | Wait | OverQuota    Release ─► Released
    Extend ─► Extended                       Detach  ─► Detached
    AddFormat ─► FormatAdded

(and llama.cpp's operations on sequences: namespaces/sequence_commands.py; reading from outside: hold_commands.py)

Events (`Granted`, `Preempt`, `Relocate`) reach a lease through `PoolState.events_after`.
"""

from __future__ import annotations

import msgspec

from remora.namespaces.command_base import Answer, Command
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.hold_commands import Held, Hold, Unheld, Unhold
from remora.namespaces.kept_chains import KeptChain, KeptMatch
from remora.namespaces.quantise_commands import Quantise, Quantised
from remora.namespaces.sequence_commands import SequenceAnswer, SequenceCommand
from remora.platform.base import errors
from remora.platform.base.ids import (
    BlockHash,
    Epoch,
    GeometryId,
    ModelId,
    NamespaceId,
    ReplicaId,
    SequenceId,
    SessionId,
)


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that cannot be mistaken for another: pids are reused, (boot, pid, start time) are not."""

    pid: int
    start_time_ticks: int
    boot_id: str


class Attach(Command, frozen=True, kw_only=True, tag=True):
    """Registers a replica. Always call 1 of a lease; a lease id is used once."""

    replica_id: ReplicaId
    model_id: ModelId
    geometry: KVGeometry
    #: Geometry + weights + adapter + tokenizer (namespaces/hashing.py: kv_fingerprint).
    fingerprint: bytes
    process: ProcessIdentity
    #: Whether it takes `Relocate` events and acknowledges them; else its blocks stay where they are while it uses them.
    relocates: bool = False
    #: Device memory besides KV that the process will hold; refused if it does not fit the ledger.
    reserved_bytes: int = 0


class AddFormat(Command, frozen=True, kw_only=True, tag=True):
    """From now on sequences of the lease may have their KV in this format too: the same model in another precision.
    To say it again is harmless."""

    geometry: KVGeometry
    #: As in Attach, of this geometry.
    fingerprint: bytes


class Admit(Command, frozen=True, kw_only=True, tag=True):
    """Asks for a sequence: longest cached prefix, references on it, and new blocks for the rest, in one step."""

    sequence_id: SequenceId
    namespace_id: NamespaceId
    #: Chain hashes of all full blocks of the prompt, in order. The pool never matches the block that holds the last
    #: prompt token, so at least one token is always evaluated.
    hashes: tuple[BlockHash, ...]
    num_tokens: int
    #: Blocks the sequence must hold at once to start (prompt and a reserve); at least ceil(num_tokens / block_tokens).
    num_blocks: int
    #: Blocks it can come to need (prompt + max_tokens); more than the namespace can ever have is OverQuota.
    max_blocks: int
    session_id: SessionId | None = None
    epoch: Epoch = Epoch(0)
    priority: int = 0
    #: Which of the lease's formats the sequence has, as long as it runs; None: that of the attach.
    geometry_id: GeometryId | None = None
    #: The same tokens in other precisions, as far as a session had them before: they may be found converted.
    kept: tuple[KeptChain, ...] = ()
    #: Clock time after which a parked admission is answered OverQuota by an event.
    deadline_s: float | None = None
    #: For copies of what runs elsewhere: takes what is free or cached, never waits nor has anybody give way, and counts
    #: in no statistics.
    background: bool = False


class ExtendItem(msgspec.Struct, frozen=True, kw_only=True):
    sequence_id: SequenceId
    num_blocks: int


class Extend(Command, frozen=True, kw_only=True, tag=True):
    """Asks for more blocks at the end of running sequences. Never waits."""

    items: tuple[ExtendItem, ...]


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """Block number `position` (0-based) of the sequence's table is full and final."""

    sequence_id: SequenceId
    position: int
    block_hash: BlockHash


class Publish(Command, frozen=True, kw_only=True, tag=True):
    """Makes full blocks immutable and findable. A hash that is already indexed leaves the block private."""

    seals: tuple[Seal, ...]


class Release(Command, frozen=True, kw_only=True, tag=True):
    """Drops the references of sequences, tail first; also withdraws parked admissions.

    Sequences that are unknown because they were released before are ignored (tombstones).
    """

    sequence_ids: tuple[SequenceId, ...]


class Relocated(Command, frozen=True, kw_only=True, tag=True):
    """Everything that `Relocate` events up to this number said is done: no table of the lease names an old place."""

    event_no: int


class Detach(Command, frozen=True, kw_only=True, tag=True):
    """Ends the lease in peace: everything it holds is released."""


class LeaseLost(Command, frozen=True, kw_only=True, tag=True):
    """Said by the pool's shell after the process is proven gone (pidfd). Never said on a time-out alone."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What a namespace may hold on this device, in bytes. guaranteed <= limit."""

    guaranteed_bytes: int
    limit_bytes: int
    weight: float = 1.0


class SetQuota(Command, frozen=True, kw_only=True, tag=True):
    """Creates the namespace or changes its quota or precision. `model_id`, `tenant` and `share_group` cannot change
    later."""

    namespace_id: NamespaceId
    model_id: ModelId
    quota: Quota
    #: Tenant of the namespace; share groups never cross tenants.
    tenant: str = ""
    #: Namespaces of one tenant with the same non-empty group share blocks; all others never do.
    share_group: str = ""
    #: Precision of its KV; None: the model's. Below another namespace that one's precision counts. The pool counts
    #: guarantees in blocks of it; which format a sequence has is up to its admission.
    kv_precision: KVPrecision | None = None


class EndSession(Command, frozen=True, kw_only=True, tag=True):
    """The session was deleted or has expired: its cached blocks are not expected back. A command of the pool itself."""

    session_id: SessionId


class Compact(Command, frozen=True, kw_only=True, tag=True):
    """Moves blocks of the namespace's geometries together (namespaces/compaction.py). A command of the pool itself."""

    namespace_id: NamespaceId
    #: Blocks to move in this round, about.
    max_blocks: int = 256


class Trim(Command, frozen=True, kw_only=True, tag=True):
    """Evicts cached blocks of a namespace and all below it until they hold no more than this. Those below it keep what
    they are guaranteed. A command of the pool itself."""

    namespace_id: NamespaceId
    target_bytes: int


class Tick(Command, frozen=True, kw_only=True, tag=True):
    """Lets time pass: parked admissions past their deadline are answered."""


# ---- answers ---------------------------------------------------------------------------------------------------------


class Attached(Answer, frozen=True, kw_only=True, tag=True):
    #: Index of the lease's generation word in the arena header.
    lease_slot: int
    #: The word holds this value for as long as the lease may write; the replica checks it after each step.
    generation: int
    incarnation: int
    block_bytes: int


class FormatAdded(Answer, frozen=True, kw_only=True, tag=True):
    block_bytes: int


class AttachRefused(Answer, frozen=True, kw_only=True, tag=True):
    reason: str


class Taken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What new blocks cost; for traces."""

    #: Cached blocks that went for them, by cause (namespaces/blocks.py).
    evicted_blocks: tuple[tuple[str, int], ...] = ()
    #: By how much more than before the namespace holds above its guarantee.
    borrowed_bytes: int = 0


class Admitted(Answer, frozen=True, kw_only=True, tag=True):
    """The sequence's table: first `num_cached_blocks` shared and sealed, the rest private and writable."""

    sequence_id: SequenceId
    blocks: tuple[int, ...]
    num_cached_blocks: int
    #: Of those, blocks that somebody else held at that time; for traces.
    num_shared_blocks: int = 0
    taken: Taken | None = None
    #: Set when the admission had kept chains.
    kept: KeptMatch | None = None


class Wait(Answer, frozen=True, kw_only=True, tag=True):
    """Parked. `Granted` or `Denied` follows as an event."""

    sequence_id: SequenceId
    queue_position: int


class OverQuota(Answer, frozen=True, kw_only=True, tag=True):
    """Waiting cannot help (or the deadline has passed): the namespace can never, or not in time, hold this."""

    sequence_id: SequenceId
    namespace_id: NamespaceId
    needed_bytes: int
    limit_bytes: int
    reason: str


class Grant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    sequence_id: SequenceId
    blocks: tuple[int, ...]
    taken: Taken | None = None


class Extended(Answer, frozen=True, kw_only=True, tag=True):
    """Per item a grant, or the item is in `refused`: ask again after the next event or step.

    For refused items the pool has named victims; each victim's lease gets a `Preempt` event. A refused sequence that
    is its own victim appears in `preempted`.
    """

    grants: tuple[Grant, ...]
    refused: tuple[SequenceId, ...] = ()
    preempted: tuple[SequenceId, ...] = ()


class Published(Answer, frozen=True, kw_only=True, tag=True):
    num_sealed: int
    num_duplicate: int


class Released(Answer, frozen=True, kw_only=True, tag=True):
    num_released: int


class Detached(Answer, frozen=True, kw_only=True, tag=True):
    pass


class QuotaSet(Answer, frozen=True, kw_only=True, tag=True):
    #: Bytes of cached blocks revoked so that the new quota holds.
    revoked_bytes: int = 0


class Compacted(Answer, frozen=True, kw_only=True, tag=True):
    num_moved_blocks: int = 0
    #: Blocks that wait for replicas to switch to their new place.
    num_moving_blocks: int = 0
    num_released_extents: int = 0
    #: Extents of these geometries now.
    num_extents: int = 0


class Trimmed(Answer, frozen=True, kw_only=True, tag=True):
    trimmed_bytes: int
    num_released_extents: int


class Done(Answer, frozen=True, kw_only=True, tag=True):
    pass


class Refused(Answer, frozen=True, kw_only=True, tag=True):
    """A command that broke the protocol; nothing changed. `error` is the class name in platform/base/errors.py."""

    error: str
    message: str

    def as_error(self) -> errors.RemoraError:
        """The exception it names; PoolError for OverQuota, which a pool says as an answer, and for unknown names."""
        if errors.error_class(self.error) in (None, errors.OverQuota):
            return errors.PoolError(f"{self.error}: {self.message}")
        return errors.named_error(self.error, self.message)


AnyCommand = (
    Attach
    | AddFormat
    | Admit
    | Extend
    | Publish
    | Release
    | Relocated
    | Detach
    | LeaseLost
    | SetQuota
    | EndSession
    | Tick
    | Compact
    | Trim
    | Quantise
    | Hold
    | Unhold
    | SequenceCommand
)
AnyAnswer = (
    Attached | AttachRefused | FormatAdded | Admitted | Wait | OverQuota | Extended | Published | Released | Detached
    | QuotaSet | Compacted | Trimmed | Quantised | Held | Unheld | Done | Refused | SequenceAnswer
)  # fmt: skip


# ---- events ----------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    #: 1, 2, 3, ... within the lease.
    event_no: int


class Granted(Event, frozen=True, kw_only=True, tag=True):
    """A parked admission came through."""

    admitted: Admitted


class Denied(Event, frozen=True, kw_only=True, tag=True):
    """A parked admission ended without memory."""

    over_quota: OverQuota


class Preempt(Event, frozen=True, kw_only=True, tag=True):
    """Release this sequence now and admit it again later; its sealed blocks stay cached while memory lasts."""

    sequence_id: SequenceId
    reason: str


class RelocateItem(msgspec.Struct, frozen=True, kw_only=True):
    """Entry `position` of the sequence's table comes to name another block; nothing to do if it is not the old one."""

    sequence_id: SequenceId
    position: int
    old_block: int
    new_block: int
    #: The lease has to copy the bytes first, whole.
    copy: bool


class Relocate(Event, frozen=True, kw_only=True, tag=True):
    """Blocks of the lease's tables lie elsewhere: switch between two steps, then say `Relocated`."""

    items: tuple[RelocateItem, ...]


AnyEvent = Granted | Denied | Preempt | Relocate
