"""The pool actor: one per device, named, detached, bound to its node. The only writer of its pool's state.

call ─► DurablePool.apply (journal, state, effects; no await) ─► answers
pidfd of a leased process readable ─► LeaseLost ─► its memory is reused
revoke: generation word ─► SIGKILL ─► exit proven ─► LeaseLost                          (design §4.1)
restart: state from the journal; leases of living processes go on, the others are lost  (design §4.6)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from functools import partial
from typing import Any, Final

import msgspec

from remora.cache_actors.block_exports import BlockBytes, as_held, hold_command, read_blocks, unhold_command
from remora.cache_actors.block_server import BlockServer
from remora.cache_actors.cuda_arena import CudaArena
from remora.cache_actors.durable_pool import DurablePool
from remora.cache_actors.pool_call_link import PoolCallServer
from remora.cache_actors.pool_messages import (
    CallReply,
    EventsReply,
    HoldReply,
    KVFormats,
    PoolBinding,
    PoolDescription,
    decode_commands,
    encode_reply,
)
from remora.cache_actors.pool_replication import PoolReplication
from remora.cache_actors.pool_settings import POOL_LEASE, PoolSettings
from remora.cache_actors.pool_upkeep import compact, quantise
from remora.cache_actors.process_watch import ProcessWatch
from remora.cache_actors.stale_files import step_lock_path
from remora.namespaces.commands import (
    AnyAnswer,
    AnyCommand,
    Attach,
    Attached,
    AttachRefused,
    Compact,
    Detached,
    EndSession,
    LeaseLost,
    Refused,
    SetQuota,
    Tick,
    Trim,
)
from remora.namespaces.hold_commands import Hold, Unhold
from remora.namespaces.quantise_commands import Quantise
from remora.namespaces.report import LeaseReport
from remora.platform.base.clock import SystemClock
from remora.platform.base.errors import IntegrityError, InvalidRequest, StaleLease
from remora.platform.base.ids import BlockHash, HoldId, LeaseId, NamespaceId, SessionId
from remora.platform.base.threads import wake_promptly

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S: Final = 0.1
_IDLE_S: Final = 0.5


class PoolActor:
    """All methods run on the actor's event loop; mutations contain no await."""

    def __init__(self, settings: PoolSettings) -> None:
        """Creates, adopts or replaces the arena and recovers the journal. Raises ArenaError when there is no room."""
        logging.basicConfig(level=logging.INFO)
        wake_promptly()
        self._settings = settings
        self._pool = DurablePool(settings, SystemClock())
        self._watches: dict[LeaseId, ProcessWatch] = {}
        self._wakers: dict[LeaseId, asyncio.Event] = {}
        self._heard_s: dict[LeaseId, float] = {}
        self._blocks = BlockServer(self._pool, self._pool.arena.data, name=settings.pool_id)
        self._calls = PoolCallServer(self.call, name=settings.pool_id)
        self._touched_s = time.monotonic()
        self._is_checked = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._in_background(self._keep_house())
        self._rejoin()
        self._replication = PoolReplication(
            settings, self._pool, attach=self._attach, commit=self._commit, in_background=self._in_background
        )

    # ---- replicas ----------------------------------------------------------------------------------------------------

    async def binding(self) -> bytes:
        """PoolBinding: what a replica needs to map the memory and to find its device."""
        return msgspec.msgpack.encode(self._binding())

    async def call(self, lease_id: LeaseId, data: bytes, event_no: int) -> bytes:
        """Applies a lease's commands in order. Answers CallReply with the lease's events after `event_no`.

        Raises Unavailable when the journal has no room; nothing was changed and the same call may be repeated.
        """
        commands = decode_commands(data)
        answers = self._apply(lease_id, commands)
        self._replication.note(commands)
        return encode_reply(
            CallReply(
                answers=tuple(answers),
                events=self._pool.events_after(lease_id, event_no),
                last_call_no=self._last_call_no(lease_id),
            )
        )

    async def open_calls(self) -> bytes:
        """LinkAddress | None: where `call` is answered faster than through Ray."""
        return msgspec.msgpack.encode(self._calls.links.open())

    async def wait_events(self, lease_id: LeaseId, event_no: int, timeout_s: float) -> bytes:
        """Answers EventsReply as soon as the lease has events after `event_no`, at the latest after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            events = self._pool.events_after(lease_id, event_no)
            known = lease_id in self._watches
            rest_s = deadline_s - time.monotonic()
            if events or not known or rest_s <= 0:
                last_call_no = self._last_call_no(lease_id)
                return encode_reply(EventsReply(events=events, last_call_no=last_call_no, lease_known=known))
            self._heard_s[lease_id] = time.monotonic()
            waker = self._wakers.setdefault(lease_id, asyncio.Event())
            waker.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waker.wait(), rest_s)

    async def kv_formats(self) -> bytes:
        """KVFormats: what new sequences of each namespace should have, and what there may be blocks of."""
        return msgspec.msgpack.encode(KVFormats(self._pool.kv_precisions(), self._pool.geometries()))

    # ---- readers from outside ----------------------------------------------------------------------------------------

    async def hold(self, data: bytes) -> bytes:
        """Answers a Hold with HoldReply: cached blocks that stay as they are for a while."""
        command = msgspec.msgpack.decode(data, type=Hold)
        held = as_held(self._commit([hold_command(command)])[0])
        arena = self._pool.arena
        return msgspec.msgpack.encode(
            HoldReply(
                held=held,
                node_id=self._settings.node_id,
                arena_path=str(arena.path) if self._settings.device.kind == "cpu" else "",
                incarnation=arena.header.incarnation,
            )
        )

    async def read_blocks(self, hold_id: HoldId, first: int, count: int) -> BlockBytes | None:
        """The bytes of held blocks, for another node; None when they are not held any more."""
        return await read_blocks(self._pool, hold_id, first, count)

    async def open_links(self) -> bytes:
        """LinkAddress | None: where readers on other nodes get bytes faster than through Ray."""
        return msgspec.msgpack.encode(self._blocks.open() if self._settings.device.kind == "cpu" else None)

    async def unhold(self, hold_ids: list[HoldId]) -> None:
        """The readers are done."""
        self._commit([unhold_command(hold_ids)])

    async def replicate(self, data: bytes) -> bytes:
        """Takes a copy of another node's blocks: a ReplicationOrder, answered with ReplicationReply."""
        return await self._replication.take(data)

    # ---- operators ---------------------------------------------------------------------------------------------------

    async def describe(self) -> PoolDescription:
        """The whole pool for `/v1/pools` and `/v1/namespaces`."""
        now_s = time.monotonic()
        report = self._pool.describe()
        leases = tuple(lease for lease in report.leases if not self._replication.owns(lease.lease_id))
        return PoolDescription(
            binding=self._binding(),
            report=msgspec.structs.replace(report, leases=leases),
            silent_s={
                lease.lease_id: now_s - self._heard_s[lease.lease_id] if lease.lease_id in self._heard_s else None
                for lease in leases
            },
            num_restarts=self._pool.arena.header.num_restarts,
            journal_bytes=self._pool.journal_bytes,
            pid=os.getpid(),
            replication=self._replication.report(),
        )

    async def leases(self) -> tuple[LeaseReport, ...]:
        """Every live lease."""
        return self._pool.leases()

    async def set_quota(self, command: SetQuota) -> AnyAnswer:
        """Creates a namespace or changes its quota; QuotaSet, or Refused with the reason."""
        return self._commit([msgspec.structs.replace(command, lease_id=POOL_LEASE, call_no=0)])[0]

    async def trim(self, namespace_id: NamespaceId, target_bytes: int | None) -> AnyAnswer:
        """Gives up a namespace's cache down to a size, by default its guarantee; Trimmed, or Refused."""
        if target_bytes is None:
            known = {each.namespace_id: each.guaranteed_bytes for each in self._pool.describe().namespaces}
            target_bytes = known.get(namespace_id, 0)
        return self._commit([Trim(lease_id=POOL_LEASE, namespace_id=namespace_id, target_bytes=target_bytes)])[0]

    async def compact(self, namespace_id: NamespaceId) -> AnyAnswer:
        """Moves the blocks of the namespace's geometry together, round by round. Compacted, or Refused."""
        return await compact(self._commit, namespace_id)

    async def quantise(self, namespace_id: NamespaceId, data: bytes) -> AnyAnswer:
        """Does rounds of a Quantise command, others' calls in between. Quantised, or Refused, as always on a GPU."""
        if self._settings.device.kind != "cpu":
            message = "blocks in the memory of a GPU are not re-encoded yet: trim the namespace instead"
            return Refused(error=InvalidRequest.__name__, message=message)
        command = msgspec.msgpack.decode(data, type=Quantise)
        return await quantise(self._commit, msgspec.structs.replace(command, namespace_id=namespace_id))

    async def end_sessions(self, session_ids: list[SessionId]) -> None:
        """These sessions are over: what only they had cached goes before anything else."""
        self._commit([EndSession(lease_id=POOL_LEASE, session_id=session_id) for session_id in session_ids])

    async def find_blocks(self, namespace_id: NamespaceId, fingerprint: bytes, hashes: tuple[BlockHash, ...]) -> int:
        """How many of the first blocks of a chain are here."""
        return self._pool.find_blocks(namespace_id, fingerprint, hashes)

    async def revoke(self, lease_id: LeaseId, reason: str) -> bool:
        """Takes a lease away: kills its process, waits for the exit, then reuses its memory. False: no such lease."""
        lease, watch = self._pool.lease(lease_id), self._watches.get(lease_id)
        if lease is None or watch is None:
            return False
        logger.warning("revoking lease %s: %s", lease_id, reason)
        self._pool.fence(lease)
        await watch.kill_and_wait()
        self._exited(lease_id)
        return True

    async def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant of the state, the arena or the leases is broken."""
        self._pool.check_integrity()
        self._replication.check_integrity()
        different = {lease.lease_id for lease in self._pool.leases()} ^ set(self._watches)
        if different:
            raise IntegrityError(f"leases without a watched process, or the reverse: {sorted(different)}")

    async def retire(self) -> None:
        """Removes the pool's files; whoever still maps the arena must stop. The actor is good for nothing then."""
        for task in self._tasks:
            task.cancel()
        for lease_id in list(self._watches):
            self._forget(lease_id)
        self._blocks.close()
        self._calls.links.close()
        self._pool.retire()
        step_lock_path(self._settings.shm_dir, self._settings.cluster_name, self._settings.pool_id).unlink(
            missing_ok=True
        )

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _apply(self, lease_id: LeaseId, commands: list[AnyCommand]) -> list[AnyAnswer]:
        for command in commands:
            if command.lease_id != lease_id or isinstance(
                command, LeaseLost | SetQuota | EndSession | Tick | Compact | Trim | Quantise | Hold | Unhold
            ):
                return [Refused(error=StaleLease.__name__, message="not a command of this lease")] * len(commands)
        answers: list[AnyAnswer] = []
        if commands and isinstance(commands[0], Attach):
            answers.append(self._attach(commands[0]))
            commands = commands[1:]
        answers += self._commit(commands)
        if any(isinstance(answer, Detached) for answer in answers):
            self._forget(lease_id)
        elif lease_id in self._watches:
            self._heard_s[lease_id] = time.monotonic()
        return answers

    def _attach(self, command: Attach) -> AnyAnswer:
        """Watches the process first: no lease for a process whose end could not be proven."""
        if command.lease_id in self._watches:
            return self._commit([command])[0]
        try:
            watch = ProcessWatch(command.process)
        except OSError as error:
            return AttachRefused(reason=f"process {command.process.pid} cannot be watched: {error}")
        answer = self._commit([command])[0]
        if isinstance(answer, Attached):
            self._watch(command.lease_id, watch)
        else:
            watch.close()
        return answer

    def _commit(self, commands: list[AnyCommand]) -> list[AnyAnswer]:
        if not commands:
            return []
        answers = self._pool.apply(commands)
        self._touched_s, self._is_checked = time.monotonic(), False
        for waker in self._wakers.values():
            waker.set()
        return answers

    def _last_call_no(self, lease_id: LeaseId) -> int:
        lease = self._pool.lease(lease_id)
        return 0 if lease is None else lease.last_call_no

    def _watch(self, lease_id: LeaseId, watch: ProcessWatch) -> None:
        self._watches[lease_id] = watch
        watch.on_exit(partial(self._exited, lease_id))

    def _exited(self, lease_id: LeaseId) -> None:
        """The process is proven gone. Only from here does a LeaseLost come."""
        if lease_id in self._watches:
            logger.warning("the process of lease %s is gone: releasing what it held", lease_id)
            self._forget(lease_id)
            self._commit([LeaseLost(lease_id=lease_id)])

    def _forget(self, lease_id: LeaseId) -> None:
        watch = self._watches.pop(lease_id, None)
        if watch is not None:
            watch.close()
        self._heard_s.pop(lease_id, None)
        waker = self._wakers.pop(lease_id, None)
        if waker is not None:
            waker.set()

    def _rejoin(self) -> None:
        """After a restart: watches the living, loses the dead, goes on revoking where that had begun."""
        for lease in self._pool.leases():
            try:
                watch = ProcessWatch(lease.process)
            except ProcessLookupError as error:
                logger.warning("lease %s ended while the pool was away: %s", lease.lease_id, error)
                self._commit([LeaseLost(lease_id=lease.lease_id)])
                continue
            self._watch(lease.lease_id, watch)
            if self._pool.is_fenced(lease):
                self._in_background(self.revoke(lease.lease_id, "the pool restarted while revoking it"))

    async def _keep_house(self) -> None:
        """Lets time pass for parked admissions; in debug mode checks everything whenever the pool is idle."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            try:
                if self._pool.needs_time:
                    self._commit([Tick(lease_id=POOL_LEASE)])
                for lease_id in self._pool.overdue_leases():
                    lease = self._pool.lease(lease_id)
                    if lease is not None and not self._pool.is_fenced(lease):
                        self._in_background(self.revoke(lease_id, "it does not switch to the new places of its blocks"))
                is_idle = time.monotonic() - self._touched_s > _IDLE_S
                if self._settings.debug and is_idle and not self._is_checked:
                    self._is_checked = True
                    await self.check_integrity()
            except Exception:
                logger.exception("housekeeping of pool %s failed", self._settings.pool_id)

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_event_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _binding(self) -> PoolBinding:
        placed = self._pool.placed
        arena = placed.arena
        return PoolBinding(
            pool_id=self._settings.pool_id,
            kind=self._settings.device.kind,
            arena_path=str(arena.path),
            incarnation=arena.header.incarnation,
            backing=placed.backing,
            outcome=placed.outcome,
            step_lock_path=str(
                step_lock_path(self._settings.shm_dir, self._settings.cluster_name, self._settings.pool_id)
            ),
            device_uuid=arena.device_uuid() if isinstance(arena, CudaArena) else "",
            ipc_handle=arena.ipc_handle() if isinstance(arena, CudaArena) else b"",
        )
