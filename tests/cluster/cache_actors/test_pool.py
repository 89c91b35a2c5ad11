"""Pool actors on a real Ray, with real processes that are stopped and killed: the safety rules of design §4."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from replica_probe import KiB, MakePool, MakeProbe, config, node_id

from remora.cache_actors.arena import Arena
from remora.cache_actors.pool_calls import await_pool
from remora.cache_actors.pool_client import PoolClient
from remora.cache_actors.pool_handles import find_pools, get_or_create_pool
from remora.cache_actors.pool_messages import PoolBinding
from remora.cache_actors.process_watch import is_alive, process_identity
from remora.cache_actors.stale_files import cluster_files, journal_path, remove_stale
from remora.namespaces.commands import Admitted, Attached, Granted, Quota, QuotaSet, Refused, Release, SetQuota, Wait
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base import paths
from remora.platform.base.errors import ArenaError, ConfigError
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId, ReplicaId

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


async def binding_of(pool: Any) -> PoolBinding:
    return msgspec.msgpack.decode(await pool.binding.remote(), type=PoolBinding)


async def kill_pool(pool: Any) -> None:
    """SIGKILL to the actor's process; Ray starts it again."""
    os.kill((await pool.describe.remote()).pid, signal.SIGKILL)


async def describe(pool: Any) -> Any:
    """Describes the pool, also while it comes back."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return await pool.describe.remote()
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)


async def used_bytes(pool: Any) -> int:
    found: int = (await describe(pool)).report.used_bytes
    return found


# ---- rule 1: fencing -------------------------------------------------------------------------------------------------


async def test_rule_1_blocks_of_a_stopped_replica_go_to_nobody_before_its_exit(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool(arena_bytes=64 * KiB)
    victim, other = await make_probe(pool, "a"), await make_probe(pool, "b")
    admitted = await victim.admit.remote("all", 64)
    assert isinstance(admitted, Admitted)
    await victim.keep_writing.remote(admitted.blocks, 0xAA)
    pid, lease_id = await victim.pid.remote(), await victim.lease_id.remote()
    identity = process_identity(pid)
    arena = Arena.open(Path((await binding_of(pool)).arena_path))
    (lease,) = [lease for lease in await pool.leases.remote() if lease.lease_id == lease_id]
    incarnation = arena.header.incarnation
    os.kill(pid, signal.SIGSTOP)
    assert isinstance(await other.admit.remote("next", 60), Wait)
    await asyncio.sleep(1.0)
    assert await other.num_events.remote() == 0, "silence alone frees nothing"
    assert arena.header.may_emit(lease.lease_slot, lease.generation, incarnation)
    revoking = pool.revoke.remote(lease_id, "stopped")
    granted = await other.wait_event.remote()
    assert isinstance(granted, Granted)
    assert not is_alive(identity), "the exit is proven before the blocks are reused"
    assert await revoking
    assert not arena.header.may_emit(lease.lease_slot, lease.generation, incarnation)
    # Too late for the process to go on: nothing of it writes into blocks that are now another tenant's.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(0.2)
    assert await other.values.remote(granted.admitted.blocks) == {0}
    assert await other.may_emit.remote()
    await other.release.remote("next")
    assert await used_bytes(pool) == 0


async def test_rule_1_a_replica_whose_lease_was_fenced_may_not_emit_any_more(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool()
    probe = await make_probe(pool)
    assert await probe.may_emit.remote()
    (lease,) = await pool.leases.remote()
    arena = Arena.open(Path((await binding_of(pool)).arena_path))
    arena.header.set_generation(lease.lease_slot, lease.generation + 1)
    assert not await probe.may_emit.remote()
    arena.header.set_generation(lease.lease_slot, lease.generation)
    incarnation = arena.header.incarnation
    arena.header.incarnation = incarnation + 1
    assert not await probe.may_emit.remote()
    arena.header.incarnation = incarnation


async def test_a_killed_replica_loses_no_sealed_block(make_pool: MakePool, make_probe: MakeProbe) -> None:
    pool = await make_pool()
    first, second = await make_probe(pool), await make_probe(pool)
    admitted = await first.admit.remote("s", 6, extra=1)
    await first.write.remote(admitted.blocks, 7)
    await first.publish.remote("s", 6)
    os.kill(await first.pid.remote(), signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while await used_bytes(pool):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
    again = await second.admit.remote("s", 6, extra=1)
    assert again.num_cached_blocks == 6
    assert again.blocks[:6] == admitted.blocks[:6]
    assert await second.values.remote(again.blocks[:6]) == {7}


# ---- rule 5: numbered calls ------------------------------------------------------------------------------------------


async def test_rule_5_repeated_and_late_calls_change_nothing(make_pool: MakePool, make_probe: MakeProbe) -> None:
    pool = await make_pool()
    probe = await make_probe(pool)
    first = await probe.admit.remote("s", 4)  # call 2
    used = await used_bytes(pool)
    assert await probe.repeat_call.remote("s", 4, call_no=2) == first
    assert await used_bytes(pool) == used
    await probe.release.remote("s")  # call 3
    assert await probe.repeat_call.remote("s", 4, call_no=2) == first, "answered, not applied again"
    ahead = await probe.repeat_call.remote("t", 4, call_no=9)
    assert isinstance(ahead, Refused)
    assert ahead.error == "CallOrder"
    assert await used_bytes(pool) == 0
    assert isinstance(await probe.admit.remote("t", 1), Admitted), "the numbering goes on where it was"
    await probe.detach.remote()
    assert isinstance(await probe.repeat_call.remote("u", 1, call_no=6), Refused)
    assert await used_bytes(pool) == 0


# ---- rule 6: recovery ------------------------------------------------------------------------------------------------


async def test_rule_6_a_killed_pool_comes_back_with_blocks_index_and_leases(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool()
    living, dying = await make_probe(pool, "a"), await make_probe(pool, "b")
    kept = await living.admit.remote("s", 5, extra=1)
    await living.write.remote(kept.blocks, 5)
    await living.publish.remote("s", 5)
    await dying.admit.remote("x", 9)
    before = await describe(pool)
    os.kill(before.pid, signal.SIGSTOP)  # so that it cannot see the replica's end
    os.kill(await dying.pid.remote(), signal.SIGKILL)
    unanswered = living.admit.remote("during", 2, seed=1)
    await asyncio.sleep(0.2)
    os.kill(before.pid, signal.SIGKILL)
    assert isinstance(await unanswered, Admitted), "sent again under its number"
    after = await describe(pool)
    assert after.pid != before.pid
    assert after.binding.outcome == "adopted"
    assert after.binding.incarnation == before.binding.incarnation
    assert after.num_restarts == 1
    assert [lease.replica_id for lease in after.report.leases] == [f"probe-{await living.pid.remote()}"]
    assert await living.may_emit.remote()
    again = await living.admit.remote("again", 5, extra=1)
    assert again.num_cached_blocks == 5
    assert await living.values.remote(again.blocks[:5]) == {5}
    await living.release.remote("s", "during", "again")
    assert await used_bytes(pool) == 0
    for name in ("a", "b", "c"):
        assert name in [namespace.namespace_id for namespace in after.report.namespaces]


async def test_rule_6_a_damaged_journal_means_a_new_incarnation_and_replicas_stop(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool()
    probe = await make_probe(pool)
    await probe.admit.remote("s", 4)
    before = await describe(pool)
    os.kill(before.pid, signal.SIGSTOP)
    journal = journal_path(Path(before.binding.arena_path))
    data = bytearray(journal.read_bytes())
    data[40] ^= 0xFF
    journal.write_bytes(data)
    os.kill(before.pid, signal.SIGKILL)
    after = await describe(pool)
    assert after.binding.incarnation != before.binding.incarnation
    assert after.report.used_bytes == 0
    assert not await probe.may_emit.remote()
    deadline_s = time.monotonic() + 30
    while not await probe.lost_reasons.remote():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
    fresh = await make_probe(pool)
    assert isinstance(await fresh.admit.remote("s", 4), Admitted)


async def test_rule_6_many_kills_under_load_lose_and_leak_nothing(make_pool: MakePool, make_probe: MakeProbe) -> None:
    pool = await make_pool()
    probes = [await make_probe(pool, model, layers) for model, layers in (("a", 1), ("b", 2))]
    stop = False

    async def load(probe: Any, value: int) -> int:
        number = 0
        while not stop:
            number += 1
            admitted = await probe.admit.remote(f"s{number}", 3, seed=number % 5, extra=1)
            assert isinstance(admitted, Admitted), admitted
            private = admitted.blocks[admitted.num_cached_blocks :]
            assert await probe.values.remote(private) <= {0, value}
            assert await probe.values.remote(admitted.blocks[: admitted.num_cached_blocks]) <= {value}
            await probe.write.remote(private, value)
            await probe.publish.remote(f"s{number}", 3, seed=number % 5)
            await probe.release.remote(f"s{number}")
        return number

    loads = [asyncio.create_task(load(probe, value)) for probe, value in zip(probes, (11, 22), strict=True)]
    for _ in range(3):
        await asyncio.sleep(1.0)
        await kill_pool(pool)
        await describe(pool)
    await asyncio.sleep(0.5)
    stop = True
    counts = await asyncio.gather(*loads)
    assert min(counts) > 10
    assert await used_bytes(pool) == 0
    assert (await describe(pool)).num_restarts == 3


# ---- rule 8: isolation, several geometries ---------------------------------------------------------------------------


async def test_rule_8_three_geometries_and_tenants_share_one_arena_and_no_bytes(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool(arena_bytes=128 * KiB)
    probes = {model: await make_probe(pool, model, layers) for model, layers in (("a", 1), ("b", 2), ("c", 3))}
    for round_no in range(6):
        for number, (model, probe) in enumerate(probes.items()):
            size = number + 1
            count = 90 // size
            admitted = await probe.admit.remote(f"s{round_no}", count, seed=round_no)
            assert isinstance(admitted, Admitted), (model, admitted)
            assert await probe.values.remote(admitted.blocks) <= {0, size}, "another tenant's bytes"
            await probe.write.remote(admitted.blocks, size)
            if round_no % 2:
                await probe.publish.remote(f"s{round_no}", count, seed=round_no)
            await probe.release.remote(f"s{round_no}")
    report = (await describe(pool)).report
    assert len(report.geometries) == 3
    assert report.used_bytes == 0


async def test_rule_8_three_geometries_are_used_at_once_without_overlap(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool()
    probes = [(await make_probe(pool, model, layers), layers) for model, layers in (("a", 1), ("b", 2), ("c", 3))]
    tables = [await probe.admit.remote("s", 10) for probe, _ in probes]
    for (probe, layers), table in zip(probes, tables, strict=True):
        await probe.write.remote(table.blocks, layers)
    for (probe, layers), table in zip(probes, tables, strict=True):
        assert await probe.values.remote(table.blocks) == {layers}


# ---- rule 10: room for the arena -------------------------------------------------------------------------------------


async def test_rule_10_no_room_anywhere_is_an_error_that_names_the_limit(ray_cluster: None, tmp_path: Path) -> None:
    too_large = config("toolarge", tmp_path, arena_bytes=1 << 50, extent_bytes=1 << 40)
    pool = get_or_create_pool(too_large, "cpu0", node_id())
    with pytest.raises(ArenaError, match=r"devices\.cpu0\.arena_bytes"):
        await await_pool(pool)
    assert cluster_files("toolarge", paths.SHARED_MEMORY_DIR) == []


async def test_rule_10_a_small_shared_memory_gives_an_arena_in_a_file(
    ray_cluster: None, tmp_path: Path, make_probe: MakeProbe
) -> None:
    base = config("smallshm", tmp_path)
    huge_store = base.cluster.model_copy(update={"object_store_bytes": 1 << 50})
    pool = get_or_create_pool(base.model_copy(update={"cluster": huge_store}), "cpu0", node_id())
    binding = await await_pool(pool)
    assert binding.backing == "file"
    assert binding.arena_path.startswith(str(tmp_path / "state"))
    probe = await make_probe(pool)
    admitted = await probe.admit.remote("s", 4)
    await probe.write.remote(admitted.blocks, 3)
    await kill_pool(pool)
    assert (await describe(pool)).binding.backing == "file"
    assert await probe.values.remote(admitted.blocks) == {3}
    await pool.retire.remote()
    ray.kill(pool)
    assert cluster_files("smallshm", tmp_path / "state") == []


# ---- getting pools ---------------------------------------------------------------------------------------------------


async def test_there_is_one_pool_per_device_and_node_and_it_can_be_found(make_pool: MakePool, tmp_path: Path) -> None:
    first = await make_pool()
    binding = await binding_of(first)
    name = Path(binding.arena_path).name.split("@")[0].rsplit("-", 1)[1]
    second = get_or_create_pool(config(name, tmp_path), "cpu0", node_id())
    assert (await describe(first)).pid == (await describe(second)).pid
    assert len(find_pools(name)) == 1
    with pytest.raises(ConfigError, match="no device 'gpu9'"):
        get_or_create_pool(config(name, tmp_path), "gpu9", node_id())


async def test_quotas_come_from_the_configuration_and_can_be_changed(make_pool: MakePool) -> None:
    pool = await make_pool()
    command = SetQuota(
        lease_id=LeaseId(""),
        namespace_id=NamespaceId("a"),
        model_id=ModelId("a"),
        quota=Quota(guaranteed_bytes=64 * KiB, limit_bytes=128 * KiB),
        tenant="a",
    )
    assert isinstance(await pool.set_quota.remote(command), QuotaSet)
    too_much = msgspec.structs.replace(command, quota=Quota(guaranteed_bytes=1 << 40, limit_bytes=1 << 41))
    assert isinstance(await pool.set_quota.remote(too_much), Refused)
    await kill_pool(pool)
    namespaces = {namespace.namespace_id: namespace for namespace in (await describe(pool)).report.namespaces}
    assert namespaces["a"].guaranteed_bytes == 64 * KiB
    assert namespaces["b"].limit_bytes == 256 * KiB


async def test_stale_files_of_a_dead_instance_are_removed(ray_cluster: None, tmp_path: Path) -> None:
    pool = get_or_create_pool(config("stale", tmp_path), "cpu0", node_id())
    await await_pool(pool)
    assert remove_stale("stale") == [], "it lives"
    ray.kill(pool)
    deadline_s = time.monotonic() + 20
    while not remove_stale("stale"):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
    assert cluster_files("stale", paths.SHARED_MEMORY_DIR) == []


async def test_a_call_is_fast(make_pool: MakePool) -> None:
    """Round trip from a client's send to its answer; printed for the record, bounded loosely."""
    pool = await make_pool()
    client = await PoolClient.attach(
        pool,
        replica_id=ReplicaId("driver"),
        model_id=ModelId("a"),
        geometry=KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=16),
        fingerprint=b"f",
    )
    assert isinstance(client.attached, Attached)
    answered = asyncio.Event()
    client.bind(lambda *_: answered.set(), lambda _: None)
    durations = []
    for _ in range(200):
        answered.clear()
        start_s = time.perf_counter()
        client.send(Release(lease_id=LeaseId(""), sequence_ids=()))
        await answered.wait()
        durations.append(time.perf_counter() - start_s)
    start_s = time.perf_counter()
    for _ in range(10_000):
        client.may_emit()
    may_emit_s = (time.perf_counter() - start_s) / 10_000
    print(f"pool call p50 {sorted(durations)[100] * 1e3:.2f} ms, may_emit {may_emit_s * 1e6:.2f} µs")
    assert sorted(durations)[100] < 0.05
    assert client._calls._link is not None, "it went over a link"
    assert client._calls._link.is_open
    assert may_emit_s < 20e-6
    await client.detach()
