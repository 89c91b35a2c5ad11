"""Copies of sealed blocks in another pool: the same bytes under the same hashes, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from pool_helpers import ReplicaCalls, geometry, set_quota, settings

from remora.cache_actors import replicator as replicator_module
from remora.cache_actors.backup_store import BackupStore
from remora.cache_actors.block_exports import as_held, copy_blocks, hold_command, unhold_command
from remora.cache_actors.block_loader import ThreadedLoader
from remora.cache_actors.durable_pool import DurablePool
from remora.cache_actors.pool_messages import ReplicationOrder, ReplicationReply
from remora.cache_actors.port import KVSource, LoadPath
from remora.cache_actors.replicator import Replicator
from remora.namespaces.commands import AnyAnswer, AnyCommand, LeaseLost, Publish
from remora.namespaces.hold_commands import Held, Hold
from remora.namespaces.replication import ReplicationReport
from remora.platform.base.clock import SystemClock
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import ModelId, NamespaceId, PoolId

A = NamespaceId("a")
KV = geometry()


def crash(pool: DurablePool) -> None:
    """What the kernel does when the process is killed: descriptors and mappings go, bytes stay."""
    pool.arena.close()
    pool._journal.close()


class Reader:
    """Reads the source's arena; what is spoilt has another checksum than was told."""

    def __init__(self, pool: DurablePool, held: Held, world: World) -> None:
        self.path: LoadPath = "linked"
        self._pool, self._held, self._world = pool, held, world
        self.num_blocks, self.block_bytes = len(self._held.blocks), self._held.block_bytes

    def read(self, first: int, into_NB: NDArray[np.uint8]) -> tuple[int, ...]:
        sums = copy_blocks(self._pool.arena.data, self._held.blocks[first : first + len(into_NB)], into_NB)
        for row in range(len(into_NB)):
            if first + row == self._world.spoilt_block:
                into_NB[row, 7] ^= 1
        return sums

    def close(self) -> None:
        """The source lets go when it has its answer."""


class World:
    """A pool that seals, and one on another node that takes copies."""

    def __init__(self, tmp_path: Path, **more: Any) -> None:
        for name in ("source", "target"):
            (tmp_path / name).mkdir()
        options = {"replicated": (A,), "replication_bytes_per_s": 1 << 30, **more}
        self.settings = msgspec.structs.replace(settings(tmp_path / "source"), **options)
        self.source = DurablePool(self.settings, SystemClock())
        self.target_settings = settings(tmp_path / "target")
        self.target = DurablePool(self.target_settings, SystemClock())
        self.store = self.new_store()
        self.replicator = Replicator(self.source, self.settings, self, self.source.apply)
        self.writer = ReplicaCalls("w", KV)
        self.source.apply([self.writer.attach()])
        self.task = asyncio.create_task(self.replicator.run())
        self.spoilt_block: int | None = None
        self.pools = ["target"]
        self.is_silent = False
        self.orders: list[ReplicationOrder] = []

    async def restart_replicator(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.replicator = Replicator(self.source, self.settings, self, self.source.apply)
        self.task = asyncio.create_task(self.replicator.run())

    def new_store(self) -> BackupStore:
        loader = ThreadedLoader(self._find, piece_bytes=2 * KV.block_bytes)
        return BackupStore(self.target, loader, attach=self._attach, commit=self.target.apply)

    def _attach(self, command: Any) -> AnyAnswer:
        return self.target.apply([command])[0]

    def _find(self, source: KVSource) -> World:
        assert source.held is not None
        assert self.source.held(source.held.hold_id) == source.held.held, "it is held while it is read"
        self._held = source.held.held
        return self

    def hold(self, command: Hold) -> Reader:
        held = msgspec.structs.replace(self._held, blocks=self._held.blocks[: len(command.hashes)])
        return Reader(self.source, held, self)

    # replicator.Backups

    async def of_model(self, model_id: ModelId) -> Iterable[PoolId]:
        assert model_id == "m"
        return [PoolId(each) for each in self.pools]

    async def order(self, pool_id: PoolId, order: ReplicationOrder) -> ReplicationReply:
        if self.is_silent:
            raise TimeoutError("silent")
        self.orders.append(order)
        return await self.store.take(order)

    # what replicas do

    def write(self, name: str, tokens: list[int], namespace: str = "a") -> None:
        """A sequence is computed, published and released."""
        (admitted,) = self.source.apply([self.writer.admit(name, tokens, namespace)])
        for position, block in enumerate(admitted.blocks):  # type: ignore[union-attr]
            rng = np.random.default_rng(hash((name, position)) % 2**32)
            data = rng.integers(0, 256, KV.block_bytes, dtype=np.uint8)
            self.source.arena.data[block * KV.block_bytes : (block + 1) * KV.block_bytes] = data
        self.publish(name, tokens, namespace)

    def publish(self, name: str, tokens: list[int], namespace: str = "a") -> None:
        commands: list[AnyCommand] = [self.writer.publish(name, tokens, namespace), self.writer.release(name)]
        self.source.apply(commands)
        self.replicator.note(commands)

    def stored(self, pool: DurablePool, tokens: list[int]) -> list[bytes]:
        """The blocks of a prompt as a pool has them."""
        command = Hold(
            lease_id=self.writer.lease_id,
            hold_id="look",  # type: ignore[arg-type]
            namespace_id=A,
            fingerprint=self.writer.fingerprint,
            hashes=self.writer.hashes(tokens, "a"),
        )
        held = as_held(pool.apply([hold_command(command)])[0])
        size = held.block_bytes
        found = [bytes(pool.arena.data[block * size : (block + 1) * size]) for block in held.blocks]
        pool.apply([unhold_command([command.hold_id])])
        return found

    @property
    def report(self) -> ReplicationReport:
        return self.replicator.report()[A]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        for pool in (self.source, self.target):
            assert not pool.needs_time, "nothing is held any more"
            pool.check_integrity()
            pool.retire()
        self.replicator.check_integrity()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(replicator_module, "GATHER_S", 0.01)
    monkeypatch.setattr(replicator_module, "_RETRY_S", 0.05)
    monkeypatch.setattr(replicator_module, "_IDLE_S", 0.02)
    monkeypatch.setattr(replicator_module, "_LOOK_S", 0.02)
    made = World(tmp_path)
    yield made
    await made.close()


def tokens(num_blocks: int, start: int = 0) -> list[int]:
    return [start * 1000 + number for number in range(num_blocks * 16)]


async def test_sealed_blocks_are_there_with_the_same_bytes_under_the_same_hashes(world: World) -> None:
    world.write("one", tokens(7))
    assert world.report.lag_blocks == 7
    await world.until(lambda: not world.report.lag_blocks)
    original = world.stored(world.source, tokens(7))
    assert len(original) == 7
    assert world.stored(world.target, tokens(7)) == original
    assert (world.report.copied_blocks, world.report.copied_bytes) == (7, 7 * KV.block_bytes)
    held = next(each for each in world.target.describe().namespaces if each.namespace_id == A)
    assert (held.used_bytes, held.cached_bytes) == (0, 7 * KV.block_bytes), "cache of the namespace, nothing in use"
    world.write("two", tokens(7) + tokens(2, start=5))
    await world.until(lambda: not world.report.lag_blocks)
    assert world.report.copied_blocks == 9, "only what was new"


async def test_blocks_of_other_namespaces_stay_where_they_are(world: World) -> None:
    world.write("one", tokens(3), "b")
    world.write("two", tokens(2))
    await world.until(lambda: not world.report.lag_blocks)
    assert {order.namespace_id for order in world.orders} == {A}


async def test_a_block_that_was_damaged_on_its_way_is_not_stored(world: World) -> None:
    world.spoilt_block = 4
    world.write("one", tokens(7))
    await world.until(lambda: world.report.copied_blocks == 4)
    assert world.stored(world.target, tokens(7)) == world.stored(world.source, tokens(7))[:4]
    assert world.report.lag_blocks == 3
    world.spoilt_block = None
    await world.until(lambda: not world.report.lag_blocks)
    assert world.stored(world.target, tokens(7)) == world.stored(world.source, tokens(7))


async def test_a_backup_that_is_away_gets_everything_when_it_is_back(world: World) -> None:
    world.is_silent = True
    world.write("one", tokens(3))
    await asyncio.sleep(0.1)
    world.pools = []
    world.write("two", tokens(2, start=9))
    await asyncio.sleep(0.1)
    assert world.report.lag_blocks == 5
    assert world.report.lag_s > 0.1
    world.is_silent, world.pools = False, ["target"]
    await world.until(lambda: not world.report.lag_blocks)
    assert len(world.stored(world.target, tokens(3))) == 3
    assert len(world.stored(world.target, tokens(2, start=9))) == 2


async def test_what_a_backup_had_that_has_gone_is_copied_to_the_next(world: World, tmp_path: Path) -> None:
    world.write("one", tokens(4))
    world.write("two", tokens(4) + tokens(2, start=7))
    await world.until(lambda: not world.report.lag_blocks)
    world.target.retire()
    (tmp_path / "next").mkdir()
    world.target = DurablePool(settings(tmp_path / "next"), SystemClock())
    world.store, world.pools, world.is_silent = world.new_store(), ["next"], True
    await world.until(lambda: world.report.lag_blocks)
    assert world.report.lag_blocks == 6, "nothing of it is on another node"
    world.is_silent = False
    await world.until(lambda: not world.report.lag_blocks)
    assert world.stored(world.target, tokens(4) + tokens(2, start=7)) == world.stored(
        world.source, tokens(4) + tokens(2, start=7)
    )


async def test_after_a_restart_a_pool_asks_its_backup_what_is_there(world: World) -> None:
    world.pools = []
    world.write("one", tokens(3))
    world.write("two", tokens(2, start=9), "b")
    await world.restart_replicator()
    assert not world.report.lag_blocks
    world.pools = ["target"]
    await world.until(lambda: len(world.stored(world.target, tokens(3))) == 3)
    await world.restart_replicator()
    world.orders.clear()
    await world.until(lambda: world.orders and not world.report.lag_blocks)
    assert (world.report.copied_blocks, len(world.orders)) == (0, 1), "all of it is there, and b stays where it is"


async def test_what_could_not_be_held_is_copied_later(world: World) -> None:
    commit, num_failed = world.replicator._commit, 0

    def is_full_twice(commands: list[AnyCommand]) -> list[AnyAnswer]:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise Unavailable("the journal has no room")
        return commit(commands)

    world.replicator._commit = is_full_twice  # type: ignore[method-assign]
    world.write("one", tokens(3))
    await world.until(lambda: not world.report.lag_blocks)
    assert (num_failed, world.report.copied_blocks, world.report.dropped_blocks) == (2, 3, 0)


async def test_what_is_refused_there_is_given_up_and_counted(world: World) -> None:
    answer = world.target.apply([set_quota("a", tenant="a", limit=2 * KV.block_bytes)])
    assert type(answer[0]).__name__ == "QuotaSet"
    world.write("one", tokens(5))
    await world.until(lambda: world.report.dropped_blocks)
    assert (world.report.lag_blocks, world.report.copied_blocks + world.report.dropped_blocks) == (0, 5)
    assert len(world.stored(world.target, tokens(5))) == world.report.copied_blocks <= 2


async def test_what_was_evicted_before_its_turn_is_not_missed(world: World) -> None:
    world.pools = []
    world.write("one", tokens(3))
    world.source.apply([set_quota("a", tenant="a", limit=0)])
    await world.until(lambda: not world.report.lag_blocks)
    assert world.report.dropped_blocks == 0


async def test_the_rate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are as large as a quarter of a second of the rate, and pauses follow them."""
    monkeypatch.setattr(replicator_module, "GATHER_S", 0.01)
    world = World(tmp_path, replication_bytes_per_s=8 * KV.block_bytes)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(replicator_module.asyncio, "sleep", note)
    try:
        world.write("one", tokens(8))
        while world.report.lag_blocks:
            await sleep(0.001)
        assert [order.max_blocks for order in world.orders] == [2] * 4
        assert sum(pauses) >= 0.75 * 0.9, "the last order's pause comes before the next one"
    finally:
        await world.close()


async def test_a_pool_that_dies_while_it_stores_has_nothing_half_written(world: World) -> None:
    """Between admission and seal: what a new process finds are blocks of a lease whose process is gone."""
    commit, died = world.target.apply, asyncio.Event()

    def die_before_sealing(commands: Sequence[AnyCommand]) -> list[AnyAnswer]:
        if any(isinstance(command, Publish) for command in commands):
            world.is_silent = True
            died.set()
            raise Unavailable("killed")
        return commit(commands)

    world.target.apply = die_before_sealing  # type: ignore[method-assign]
    world.store = world.new_store()
    world.write("one", tokens(2))
    await died.wait()
    assert world.target.describe().num_referenced_blocks == 2
    crash(world.target)
    world.target = DurablePool(world.target_settings, SystemClock())
    world.target.apply([LeaseLost(lease_id=lease.lease_id) for lease in world.target.leases()])
    assert world.stored(world.target, tokens(2)) == []
    assert world.target.describe().num_referenced_blocks == 0
    world.store, world.is_silent = world.new_store(), False
    await world.until(lambda: not world.report.lag_blocks)
    assert world.stored(world.target, tokens(2)) == world.stored(world.source, tokens(2))


async def test_a_store_that_could_not_let_go_does_so_with_the_next_piece(world: World) -> None:
    commit, num_failed = world.target.apply, 0

    def is_full_once(commands: Sequence[AnyCommand]) -> list[AnyAnswer]:
        nonlocal num_failed
        if any(isinstance(command, Publish) for command in commands) and not num_failed:
            num_failed += 1
            raise Unavailable("the journal has no room")
        return commit(commands)

    world.target.apply = is_full_once  # type: ignore[method-assign]
    world.store = world.new_store()
    world.write("one", tokens(2))
    await world.until(lambda: num_failed and not world.report.lag_blocks)
    world.write("two", tokens(3))
    await world.until(lambda: len(world.stored(world.target, tokens(3))) == 3)
    assert world.target.describe().num_referenced_blocks == 0
