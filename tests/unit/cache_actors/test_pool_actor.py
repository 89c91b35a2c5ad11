"""The pool actor's own logic, without Ray: leases end only with proof, events arrive, restarts go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from pool_helpers import BLOCK_TOKENS, KiB, ReplicaCalls, set_quota, settings

from remora.cache_actors.pool_actor import PoolActor
from remora.cache_actors.pool_messages import decode_call_reply, decode_events_reply, encode_commands
from remora.cache_actors.process_watch import ProcessWatch, is_alive, process_identity
from remora.namespaces import relocation
from remora.namespaces.commands import (
    Admitted,
    AnyAnswer,
    AnyCommand,
    AnyEvent,
    Attached,
    AttachRefused,
    Compacted,
    Denied,
    Detached,
    Granted,
    LeaseLost,
    Refused,
    Relocate,
    Relocated,
    Trimmed,
    Wait,
)
from remora.platform.base.ids import NamespaceId, SessionId

ALL_BLOCKS = 64


def crash(actor: PoolActor) -> None:
    for task in actor._tasks:
        task.cancel()
    for watch in actor._watches.values():
        watch.close()
    actor._pool.arena.close()
    actor._pool._journal.close()


@pytest.fixture
async def actor(tmp_path: Path) -> AsyncIterator[PoolActor]:
    actor = PoolActor(settings(tmp_path, arena_bytes=64 * KiB))
    yield actor
    await actor.check_integrity()
    await actor.retire()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


async def call(actor: PoolActor, *commands: AnyCommand, event_no: int = 0) -> list[AnyAnswer]:
    data = await actor.call(commands[0].lease_id, encode_commands(commands), event_no)
    return list(decode_call_reply(data).answers)


async def next_events(actor: PoolActor, calls: ReplicaCalls, event_no: int = 0) -> tuple[AnyEvent, ...]:
    return decode_events_reply(await actor.wait_events(calls.lease_id, event_no, 10.0)).events


async def fill_from(actor: PoolActor, calls: ReplicaCalls, pid: int) -> Attached:
    """A lease of the process that holds every block."""
    attached, admitted = await call(actor, calls.attach(pid), calls.admit("all", range(ALL_BLOCKS * BLOCK_TOKENS), "b"))
    assert isinstance(attached, Attached)
    assert isinstance(admitted, Admitted)
    return attached


async def test_a_process_that_dies_gives_its_blocks_back_and_waiting_ones_get_them(
    actor: PoolActor, child: subprocess.Popen[bytes]
) -> None:
    holder, waiter = ReplicaCalls("holder"), ReplicaCalls("waiter")
    await fill_from(actor, holder, child.pid)
    _, wait = await call(actor, waiter.attach(), waiter.admit("w", range(100)))
    assert isinstance(wait, Wait)
    poll = asyncio.create_task(next_events(actor, waiter))
    await asyncio.sleep(0.2)
    assert not poll.done()
    child.kill()
    (event,) = await poll
    assert isinstance(event, Granted)
    assert [lease.lease_id for lease in await actor.leases()] == ["waiter"]
    reply = decode_events_reply(await actor.wait_events(holder.lease_id, 0, 10.0))
    assert not reply.lease_known


async def test_blocks_of_a_stopped_process_are_not_reused_before_its_exit_is_proven(
    actor: PoolActor, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, waiter = ReplicaCalls("holder"), ReplicaCalls("waiter")
    attached = await fill_from(actor, holder, child.pid)
    identity = process_identity(child.pid)
    await call(actor, waiter.attach(), waiter.admit("w", range(100)))
    os.kill(child.pid, signal.SIGSTOP)
    kills: list[int] = []
    real_kill = ProcessWatch.kill
    # A kill that does not work yet, as for a process in an uninterruptible system call.
    monkeypatch.setattr(ProcessWatch, "kill", lambda watch: kills.append(watch.identity.pid))
    revoking = asyncio.create_task(actor.revoke(holder.lease_id, "test"))
    await asyncio.sleep(0.3)
    os.kill(child.pid, signal.SIGCONT)
    await asyncio.sleep(0.3)
    assert kills == [child.pid]
    assert is_alive(identity)
    assert not revoking.done()
    header = actor._pool.arena.header
    assert not header.may_emit(attached.lease_slot, attached.generation, attached.incarnation), "fenced at once"
    assert decode_events_reply(await actor.wait_events(waiter.lease_id, 0, 0.0)).events == ()
    assert len(await actor.leases()) == 2
    await actor.check_integrity()
    real_kill(actor._watches[holder.lease_id])
    assert await revoking
    assert not is_alive(identity)
    assert isinstance((await next_events(actor, waiter))[0], Granted)
    assert not await actor.revoke(holder.lease_id, "again")


async def test_leases_of_living_processes_survive_the_pool_and_those_of_dead_ones_end(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    first = PoolActor(settings(tmp_path, arena_bytes=64 * KiB))
    living, dying = ReplicaCalls("living"), ReplicaCalls("dying")
    await call(first, living.attach(), living.admit("s", range(64)))
    await call(first, dying.attach(child.pid), dying.admit("s", range(64)))
    used = (await first.describe()).report.used_bytes
    crash(first)
    second = PoolActor(settings(tmp_path, arena_bytes=64 * KiB))
    assert (await second.describe()).report.used_bytes == used, "both may still write"
    crash(second)
    child.kill()
    child.wait()
    third = PoolActor(settings(tmp_path, arena_bytes=64 * KiB))
    description = await third.describe()
    assert description.report.used_bytes == used // 2
    assert description.num_restarts == 2
    assert [lease.lease_id for lease in await third.leases()] == ["living"]
    assert isinstance((await call(third, living.release("s")))[0], AnyAnswer)
    assert (await third.describe()).report.used_bytes == 0
    await third.check_integrity()
    await third.retire()


async def test_a_revocation_goes_on_after_a_restart(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    first = PoolActor(settings(tmp_path, arena_bytes=64 * KiB))
    calls = ReplicaCalls("l")
    await call(first, calls.attach(child.pid))
    lease = first._pool.lease(calls.lease_id)
    assert lease is not None
    first._pool.fence(lease)
    crash(first)
    second = PoolActor(settings(tmp_path, arena_bytes=64 * KiB))
    deadline_s = time.monotonic() + 10
    while await second.leases():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
    assert child.wait() == -signal.SIGKILL
    await second.retire()


async def test_no_lease_without_a_process_that_can_be_watched(actor: PoolActor, child: subprocess.Popen[bytes]) -> None:
    attach = ReplicaCalls("l").attach(child.pid)
    child.kill()
    child.wait()
    (answer,) = await call(actor, attach)
    assert isinstance(answer, AttachRefused)
    assert await actor.leases() == ()


async def test_a_replica_cannot_say_what_only_the_pool_may_say(actor: PoolActor) -> None:
    calls, victim = ReplicaCalls("l"), ReplicaCalls("victim")
    await call(actor, victim.attach())
    await call(actor, calls.attach())
    for command in (LeaseLost(lease_id=victim.lease_id), LeaseLost(lease_id=calls.lease_id), set_quota("x")):
        data = encode_commands([command])
        answers = decode_call_reply(await actor.call(calls.lease_id, data, 0)).answers
        assert all(isinstance(answer, Refused) for answer in answers)
    assert len(await actor.leases()) == 2
    assert len((await actor.describe()).report.namespaces) == 2


async def test_a_parked_admission_past_its_deadline_is_denied(actor: PoolActor, child: subprocess.Popen[bytes]) -> None:
    holder, waiter = ReplicaCalls("holder"), ReplicaCalls("waiter")
    await fill_from(actor, holder, child.pid)
    admit = msgspec.structs.replace(waiter.admit("w", range(100)), deadline_s=time.monotonic() + 0.3)
    _, wait = await call(
        actor, msgspec.structs.replace(waiter.attach(), call_no=1), msgspec.structs.replace(admit, call_no=2)
    )
    assert isinstance(wait, Wait)
    (event,) = await asyncio.wait_for(next_events(actor, waiter), 5)
    assert isinstance(event, Denied)


async def test_a_detached_lease_is_not_watched_any_more(actor: PoolActor, child: subprocess.Popen[bytes]) -> None:
    calls = ReplicaCalls("l")
    answers = await call(actor, calls.attach(child.pid), calls.admit("s", range(64)), calls.detach())
    assert isinstance(answers[-1], Detached)
    assert (await actor.describe()).report.used_bytes == 0
    assert await actor.leases() == ()
    child.kill()
    child.wait()
    await asyncio.sleep(0.1)
    await actor.check_integrity()


async def test_a_session_that_ended_gives_its_blocks_first_and_a_chain_can_be_looked_up(actor: PoolActor) -> None:
    calls = ReplicaCalls("l")
    mine, other = range(64), range(1000, 1064)
    await call(actor, calls.attach(), msgspec.structs.replace(calls.admit("s", mine), session_id=SessionId("x")))
    await call(actor, calls.publish("s", mine), calls.release("s"))
    await call(actor, calls.admit("o", other), calls.publish("o", other), calls.release("o"))
    assert await actor.find_blocks(NamespaceId("a"), b"f", calls.hashes(mine, "a")) == len(mine) // BLOCK_TOKENS
    assert await actor.find_blocks(NamespaceId("b"), b"f", calls.hashes(mine, "a")) == 0
    assert await actor.find_blocks(NamespaceId("a"), b"another model", calls.hashes(mine, "a")) == 0
    await actor.end_sessions([SessionId("x"), SessionId("unknown")])
    num_blocks = ALL_BLOCKS - len([*mine, *other]) // BLOCK_TOKENS + 2
    await call(actor, calls.admit("more", range(5000, 5000 + num_blocks * BLOCK_TOKENS), "a"))
    left = [await actor.find_blocks(NamespaceId("a"), b"f", calls.hashes(tokens, "a")) for tokens in (mine, other)]
    assert left == [len(mine) // BLOCK_TOKENS - 2, len(other) // BLOCK_TOKENS]


async def scatter(actor: PoolActor, calls: ReplicaCalls, pid: int | None) -> None:
    """Two extents with 4 blocks each of a sequence that runs."""
    attach = msgspec.structs.replace(calls.attach(pid), relocates=True)
    commands: list[AnyCommand] = [attach]
    for number in range(2):
        commands.append(calls.admit(f"fill{number}", range(28 * BLOCK_TOKENS)))
        commands.append(calls.admit(f"keep{number}", range(4 * BLOCK_TOKENS)))
    await call(actor, *commands, calls.release("fill0", "fill1"))


async def test_a_process_that_does_not_switch_to_moved_blocks_in_time_is_taken_away(
    actor: PoolActor, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relocation, "DEADLINE_S", 0.3)
    await scatter(actor, ReplicaCalls("still"), child.pid)
    answer = await actor.compact(NamespaceId("a"))
    assert isinstance(answer, Compacted)
    assert (answer.num_moving_blocks, answer.num_extents) == (0, 0), "its blocks are free, for it is gone"
    assert child.wait(5) == -signal.SIGKILL
    assert await actor.leases() == ()


async def test_compaction_goes_on_as_soon_as_a_process_has_switched(actor: PoolActor) -> None:
    calls = ReplicaCalls("moves")
    await scatter(actor, calls, None)
    compaction = asyncio.create_task(actor.compact(NamespaceId("a")))
    (event,) = await next_events(actor, calls)
    assert isinstance(event, Relocate)
    await asyncio.sleep(0.1)
    assert not compaction.done()
    await call(actor, Relocated(lease_id=calls.lease_id, call_no=calls._next(), event_no=event.event_no))
    answer = await compaction
    assert isinstance(answer, Compacted)
    assert (answer.num_moved_blocks, answer.num_moving_blocks, answer.num_extents) == (4, 0, 1)
    trimmed = await actor.trim(NamespaceId("a"), None)
    assert isinstance(trimmed, Trimmed)


def test_a_pool_needs_no_torch_to_re_encode() -> None:
    code = "import sys; from remora.cache_actors import pool_actor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
