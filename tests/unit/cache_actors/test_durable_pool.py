"""A pool that is killed at any moment comes back as it was (design §4.6), and never hands out others' bytes."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from pool_helpers import BLOCK_TOKENS, KiB, ReplicaCalls, geometry, set_quota, settings

from remora.cache_actors import durable_pool as module
from remora.cache_actors.arena import Arena
from remora.cache_actors.durable_pool import DurablePool
from remora.cache_actors.journal_file import JournalFile
from remora.cache_actors.pool_settings import PoolSettings
from remora.cache_actors.stale_files import cluster_files, journal_path
from remora.namespaces.commands import Admitted, AnyAnswer, AnyCommand, Attached, LeaseLost, Quota, Refused
from remora.namespaces.pool import PoolState
from remora.platform.base.clock import ManualClock
from remora.platform.base.errors import ConfigError
from remora.platform.base.ids import LeaseId


def crash(pool: DurablePool) -> None:
    """What the kernel does when the process is killed: descriptors and mappings go, bytes stay."""
    pool.arena.close()
    pool._journal.close()


def restart(pool: DurablePool, with_settings: PoolSettings | None = None) -> DurablePool:
    crash(pool)
    return DurablePool(with_settings or pool._settings, ManualClock(100.0))


def one(pool: DurablePool, command: AnyCommand) -> AnyAnswer:
    (answer,) = pool.apply([command])
    return answer


def block_bytes(pool: DurablePool, index: int, size: int = KiB) -> bytes:
    return bytes(pool.arena.data[index * size : (index + 1) * size])


def fill(pool: DurablePool, blocks: tuple[int, ...], value: int, size: int = KiB) -> None:
    for index in blocks:
        pool.arena.data[index * size : (index + 1) * size] = value


def test_a_restarted_pool_has_its_blocks_index_leases_and_bytes(tmp_path: Path) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    prompt = list(range(5 * BLOCK_TOKENS))
    attached = one(pool, calls.attach())
    assert isinstance(attached, Attached)
    admitted = one(pool, calls.admit("s", prompt))
    assert isinstance(admitted, Admitted)
    fill(pool, admitted.blocks, 77)
    one(pool, calls.publish("s", prompt))
    report, incarnation = pool.describe(), pool.arena.header.incarnation
    pool = restart(pool)
    assert pool.placed.outcome == "adopted"
    assert pool.describe() == report
    assert pool.arena.header.incarnation == incarnation
    assert pool.arena.header.num_restarts == 1
    assert pool.arena.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation)
    again = one(pool, calls.admit("s2", [*prompt, 1, 2]))
    assert isinstance(again, Admitted)
    assert again.num_cached_blocks == 5
    assert again.blocks[:5] == admitted.blocks
    assert all(block_bytes(pool, block) == b"\x4d" * KiB for block in admitted.blocks)
    pool.check_integrity()


def test_a_call_whose_answer_was_lost_in_the_crash_is_answered_again_and_applied_once(tmp_path: Path) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    one(pool, calls.attach())
    admit, release = calls.admit("s", range(40)), calls.release("s")
    first = one(pool, admit)
    pool = restart(pool)
    assert one(pool, admit) == first
    used = pool.describe().used_bytes
    assert one(pool, admit) == first
    assert pool.describe().used_bytes == used
    answers = pool.apply([release])
    pool = restart(pool)
    assert pool.apply([release, release]) == answers * 2
    assert isinstance(one(pool, msgspec.structs.replace(release, call_no=9)), Refused)
    assert pool.describe().used_bytes == 0
    pool.check_integrity()


def test_a_torn_last_record_was_never_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    one(pool, calls.attach())
    before = pool.describe()
    end = pool.journal_bytes
    admit = calls.admit("s", range(40))
    effects_done = pool.arena.header.effects_done
    one(pool, admit)
    pool.arena.header.effects_done = effects_done
    crash(pool)
    path = journal_path(pool.arena.path)
    data = path.read_bytes()
    path.write_bytes(data[: end + 20] + bytes(len(data) - end - 20))
    pool = DurablePool(settings(tmp_path), ManualClock())
    assert "torn" in caplog.text
    assert pool.describe() == before
    assert isinstance(one(pool, admit), Admitted)
    pool.check_integrity()


@pytest.mark.parametrize("damage", ["snapshot", "middle", "last", "missing", "incarnation"])
def test_a_journal_that_cannot_be_trusted_means_a_new_arena_and_no_token_from_the_old(
    tmp_path: Path, damage: str
) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    attached = one(pool, calls.attach())
    assert isinstance(attached, Attached)
    for number in range(4):
        one(pool, calls.admit(f"s{number}", range(40)))
    replica = Arena.open(pool.arena.path)
    path, end = journal_path(pool.arena.path), pool.journal_bytes
    crash(pool)
    if damage == "missing":
        path.unlink()
    elif damage == "incarnation":
        other = PoolState(msgspec.structs.replace(pool._state.config, incarnation=5))
        JournalFile(path, other.snapshot(), 0).close()
    else:
        data = bytearray(path.read_bytes())
        data[{"snapshot": 40, "middle": end - 700, "last": end - 20}[damage]] ^= 0xFF
        path.write_bytes(data)
    pool = DurablePool(settings(tmp_path), ManualClock())
    assert pool.placed.outcome == "created"
    assert not replica.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation)
    replica.data[:] = 9
    assert not pool.arena.data.any(), "the old process cannot touch the new arena"
    assert isinstance(one(pool, calls.release("s")), Refused)
    assert pool.describe().used_bytes == 0


def test_blocks_are_zeroed_when_they_change_tenant_and_not_within_one(tmp_path: Path) -> None:
    pool, calls = DurablePool(settings(tmp_path, arena_bytes=64 * KiB), ManualClock()), ReplicaCalls("l1")
    one(pool, calls.attach())
    first = one(pool, calls.admit("a1", range(64 * BLOCK_TOKENS), "a"))
    assert isinstance(first, Admitted)
    fill(pool, first.blocks, 0xAA)
    one(pool, calls.release("a1"))
    same = one(pool, calls.admit("a2", range(64 * BLOCK_TOKENS), "a"))
    assert isinstance(same, Admitted)
    assert block_bytes(pool, same.blocks[0]) == b"\xaa" * KiB
    one(pool, calls.release("a2"))
    other = one(pool, calls.admit("b1", range(50 * BLOCK_TOKENS), "b"))
    assert isinstance(other, Admitted)
    assert all(not any(block_bytes(pool, block)) for block in other.blocks)


def test_a_geometry_that_takes_over_an_extent_finds_no_bytes_of_another_tenant(tmp_path: Path) -> None:
    quotas = [set_quota(name, tenant=name, model=name) for name in "abc"]
    pool = DurablePool(settings(tmp_path, *quotas, arena_bytes=96 * KiB), ManualClock())
    replicas = {
        name: ReplicaCalls(name, geometry(num_layers=layers, head_dim=16), name.encode(), model=name)
        for name, layers in (("a", 1), ("b", 2), ("c", 3))
    }
    for calls in replicas.values():
        assert isinstance(one(pool, calls.attach()), Attached)
    random_source = random.Random(1)
    for round_no in range(60):
        name = random_source.choice("abc")
        calls = replicas[name]
        size = calls.kv.block_bytes
        sequence = f"s{round_no}"
        blocks = random_source.randint(1, 90 * KiB // size - 3)
        prompt = [round_no * 1000 + token for token in range(blocks * BLOCK_TOKENS)]
        admitted = one(pool, calls.admit(sequence, prompt, name))
        assert isinstance(admitted, Admitted), admitted
        own = {0, ord(name)}
        for block in admitted.blocks:
            assert set(block_bytes(pool, block, size)) <= own, "bytes of another tenant"
        fill(pool, admitted.blocks, ord(name), size)
        if random_source.random() < 0.5:
            one(pool, calls.publish(sequence, prompt, name))
        one(pool, calls.release(sequence))
        if round_no % 7 == 0:
            pool = restart(pool)
        pool.check_integrity()


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("moment", ["after the journal", "during zeroing", "after zeroing"])
def test_a_crash_between_journal_and_answer_still_zeroes_before_the_answer_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    pool, calls = DurablePool(settings(tmp_path, arena_bytes=64 * KiB), ManualClock()), ReplicaCalls("l1")
    one(pool, calls.attach())
    first = one(pool, calls.admit("a1", range(64 * BLOCK_TOKENS), "a"))
    assert isinstance(first, Admitted)
    fill(pool, first.blocks, 0xAA)
    one(pool, calls.release("a1"))
    command = calls.admit("b1", range(40 * BLOCK_TOKENS), "b")
    real_zero, zeroed = pool.arena.zero, 0

    def zero(offset: int, num_bytes: int) -> None:
        nonlocal zeroed
        if moment == "after the journal" or (moment == "during zeroing" and zeroed == 10):
            raise Killed
        real_zero(offset, num_bytes)
        zeroed += 1
        if moment == "after zeroing" and zeroed == 40:
            raise Killed

    monkeypatch.setattr(pool.arena, "zero", zero)
    with pytest.raises(Killed):
        one(pool, command)
    monkeypatch.undo()
    pool = restart(pool)
    answer = one(pool, command)
    assert isinstance(answer, Admitted)
    assert all(not any(block_bytes(pool, block)) for block in answer.blocks)
    fill(pool, answer.blocks, 0xBB)
    pool = restart(pool)
    assert all(block_bytes(pool, block) == b"\xbb" * KiB for block in answer.blocks), "replay wiped the owner's bytes"
    pool.check_integrity()


def test_a_command_that_breaks_the_state_has_no_effect_now_or_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    attached = one(pool, calls.attach())
    one(pool, calls.admit("s0", range(40)))
    before = pool.describe()
    real_apply = PoolState.apply

    def apply(state: PoolState, command: AnyCommand, now_s: float) -> AnyAnswer:
        answer = real_apply(state, command, now_s)
        if getattr(command, "sequence_id", "") == "poison":
            raise ZeroDivisionError("a bug, after half of the work was done")
        return answer

    monkeypatch.setattr(module.PoolState, "apply", apply)
    poison, behind = calls.admit("poison", range(70)), calls.release("s0")
    answers = pool.apply([poison, behind])
    assert [isinstance(answer, Refused) and answer.error for answer in answers] == ["IntegrityError", "CallOrder"]
    assert pool.describe() == before
    pool.check_integrity()
    assert isinstance(attached, Attached)
    assert pool.arena.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation)
    pool = restart(pool)
    assert pool.describe() == before
    one(pool, LeaseLost(lease_id=LeaseId("l1")))
    assert pool.describe().used_bytes == 0


def test_a_long_life_keeps_the_journal_small_and_restarts_exact(tmp_path: Path) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    one(pool, calls.attach())
    largest = 0
    for number in range(4000):
        prompt = [number, *range(60)]
        pool.apply(
            [calls.admit(f"s{number}", prompt), calls.publish(f"s{number}", prompt), calls.release(f"s{number}")]
        )
        largest = max(largest, pool.journal_bytes)
    assert largest < 4 * 1024 * KiB
    report = pool.describe()
    pool = restart(pool)
    assert pool.describe() == report
    pool.check_integrity()


def test_a_revocation_that_had_begun_is_still_known_after_a_restart(tmp_path: Path) -> None:
    pool, calls, other = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1"), ReplicaCalls("l2")
    attached, kept = one(pool, calls.attach()), one(pool, other.attach())
    assert isinstance(attached, Attached)
    assert isinstance(kept, Attached)
    lease = pool.lease(calls.lease_id)
    assert lease is not None
    pool.fence(lease)
    assert not pool.arena.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation)
    pool = restart(pool)
    assert [pool.is_fenced(lease) for lease in pool.leases()] == [True, False]
    assert not pool.arena.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation)
    assert pool.arena.header.may_emit(kept.lease_slot, kept.generation, kept.incarnation)
    one(pool, LeaseLost(lease_id=calls.lease_id))
    again = one(pool, ReplicaCalls("l3").attach())
    assert isinstance(again, Attached)
    assert again.lease_slot == attached.lease_slot
    assert again.generation > attached.generation
    assert pool.arena.header.may_emit(again.lease_slot, again.generation, again.incarnation)


def test_an_attach_that_was_not_answered_is_not_taken_for_a_revocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(DurablePool, "_perform", killed)
    attach = calls.attach()
    with pytest.raises(Killed):
        one(pool, attach)
    monkeypatch.undo()
    pool = restart(pool)
    assert [pool.is_fenced(lease) for lease in pool.leases()] == [False]
    attached = one(pool, attach)
    assert isinstance(attached, Attached)
    assert pool.arena.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation)


# ---- the next session of the cluster ---------------------------------------------------------------------------------


def test_the_next_session_adopts_the_orphan_with_its_cache_under_the_new_configuration(tmp_path: Path) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    prompt = list(range(5 * BLOCK_TOKENS))
    one(pool, calls.attach())
    one(pool, calls.admit("s", prompt))
    one(pool, calls.publish("s", prompt))
    changed = settings(tmp_path, set_quota("a", guaranteed=200 * KiB, tenant="a"), session="s2")
    pool = restart(pool, changed)
    assert pool.placed.outcome == "adopted"
    assert pool.placed.is_orphan
    assert {path.suffix for path in cluster_files("test", tmp_path)} == {".arena", ".journal"}
    assert all("-s2." in path.name for path in cluster_files("test", tmp_path))
    assert [lease.lease_id for lease in pool.leases()] == ["l1"], "until its process is proven gone"
    one(pool, LeaseLost(lease_id=calls.lease_id))
    quotas = {namespace.namespace_id: namespace.guaranteed_bytes for namespace in pool.describe().namespaces}
    assert quotas == {"a": 200 * KiB, "b": 0}
    fresh = ReplicaCalls("l2")
    one(pool, fresh.attach())
    admitted = one(pool, fresh.admit("s", [*prompt, 1]))
    assert isinstance(admitted, Admitted)
    assert admitted.num_cached_blocks == 5


def test_a_configuration_the_old_state_cannot_follow_starts_anew(tmp_path: Path) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    attached = one(pool, calls.attach())
    assert isinstance(attached, Attached)
    replica = Arena.open(pool.arena.path)
    changed = settings(tmp_path, set_quota("a", tenant="a", model="another model"), session="s2")
    pool = restart(pool, changed)
    assert pool.placed.outcome == "created"
    assert [namespace.model_id for namespace in pool.describe().namespaces] == ["another model"]
    assert not replica.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation)
    assert len(cluster_files("test", tmp_path)) == 2


def test_other_sizes_remove_the_orphan_and_start_anew(tmp_path: Path) -> None:
    pool = DurablePool(settings(tmp_path), ManualClock())
    pool = restart(pool, settings(tmp_path, session="s2", arena_bytes=128 * KiB))
    assert pool.placed.outcome == "created"
    assert len(pool.arena.data) == 128 * KiB
    assert len(cluster_files("test", tmp_path)) == 2


def test_an_arena_that_a_living_pool_owns_is_left_alone(tmp_path: Path) -> None:
    first = DurablePool(settings(tmp_path), ManualClock())
    second = DurablePool(settings(tmp_path, session="s2"), ManualClock())
    assert second.placed.outcome == "created"
    assert first.arena.header.incarnation != 0
    assert len(cluster_files("test", tmp_path)) == 4


def test_quotas_set_while_running_survive_a_restart(tmp_path: Path) -> None:
    pool = DurablePool(settings(tmp_path), ManualClock())
    changed = msgspec.structs.replace(
        set_quota("a", tenant="a"), quota=Quota(guaranteed_bytes=64 * KiB, limit_bytes=128 * KiB, weight=3.0)
    )
    assert not isinstance(one(pool, changed), Refused)
    pool = restart(pool)
    namespace = pool.describe().namespaces[0]
    assert (namespace.guaranteed_bytes, namespace.limit_bytes, namespace.weight) == (64 * KiB, 128 * KiB, 3.0)


def test_guarantees_that_do_not_fit_are_a_configuration_error_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="namespace b"):
        DurablePool(
            settings(tmp_path, set_quota("a", guaranteed=200 * KiB), set_quota("b", guaranteed=200 * KiB)),
            ManualClock(),
        )
    assert cluster_files("test", tmp_path) == []


def test_a_retired_pool_leaves_no_file_and_tells_replicas_to_stop(tmp_path: Path) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    attached = one(pool, calls.attach())
    assert isinstance(attached, Attached)
    replica = Arena.open(pool.arena.path)
    pool.retire()
    assert not replica.header.may_emit(attached.lease_slot, attached.generation, attached.incarnation)
    assert cluster_files("test", tmp_path) == []
