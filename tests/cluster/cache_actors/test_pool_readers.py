"""Blocks of a real pool actor, read from outside: mapped on its node, sent to another, kept while they are read."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from replica_probe import BLOCK_TOKENS, KiB, MakePool, MakeProbe, node_id

from remora.cache_actors.block_loader import ThreadedLoader
from remora.cache_actors.pool_calls import await_pool
from remora.cache_actors.pool_messages import HoldReply
from remora.cache_actors.pool_reader import HeldPool, PoolReaders, RemotePool
from remora.cache_actors.port import HeldThere, KVSource, LoadedBlocks, LoadEnd, LoadOrder
from remora.namespaces.commands import Admitted, Granted, Published, Wait
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.hashing import chain_hashes, chain_root
from remora.namespaces.hold_commands import Hold
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import HoldId, LeaseId, NamespaceId, PoolId

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

NUM_BLOCKS, FIRST = 20, 3
SOURCE = KVSource(pool_id=PoolId("pool"), actor_name="pool")
ORDER = LoadOrder(
    source=SOURCE,
    namespace_id=NamespaceId("a"),
    fingerprint=b"a-1",
    hashes=tuple(chain_hashes(chain_root(b"a-1", "a"), list(range(NUM_BLOCKS * BLOCK_TOKENS)), BLOCK_TOKENS)),
    first=FIRST,
    geometry=KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=BLOCK_TOKENS),
)


async def fill(pool: Any, make_probe: MakeProbe) -> Any:
    """Caches blocks in the pool, each full of its own number; the probe has its lease still."""
    probe = await make_probe(pool, "a")
    admitted = await probe.admit.remote("one", NUM_BLOCKS, extra=1)
    assert isinstance(admitted, Admitted)
    for number, block in enumerate(admitted.blocks[:NUM_BLOCKS]):
        await probe.write.remote((block,), number)
    assert isinstance(await probe.publish.remote("one", NUM_BLOCKS), Published)
    await probe.release.remote("one")
    return probe


class Receiver:
    """Takes what a loader brings; with `waits` nothing but the first piece is taken before `go_on`."""

    def __init__(self, source: Any, *, waits: bool = False) -> None:
        self.rows: list[NDArray[np.uint8]] = []
        self.first_piece, self.go_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.end: LoadEnd | None = None
        self._loop = asyncio.get_running_loop()
        if not waits:
            self.go_on.set()
        loader = ThreadedLoader(lambda _: source, piece_bytes=4 * KiB)
        loader.start(ORDER, self._take, self._take_end)

    def _take(self, loaded: LoadedBlocks) -> None:
        asyncio.run_coroutine_threadsafe(self._keep(loaded), self._loop)

    async def _keep(self, loaded: LoadedBlocks) -> None:
        self.first_piece.set()
        await self.go_on.wait()
        assert loaded.first == FIRST + len(self.rows)
        self.rows.extend(loaded.data_NB.copy())
        loaded.give_back()

    def _take_end(self, end: LoadEnd) -> None:
        def note() -> None:
            self.end = end
            self.ended.set()

        self._loop.call_soon_threadsafe(note)

    async def result(self) -> LoadEnd:
        async with asyncio.timeout(30):
            await self.ended.wait()
        await asyncio.sleep(0.05)
        assert self.end is not None
        for number, row in enumerate(self.rows, FIRST):
            assert set(row.tolist()) == {number}
        return self.end


def at(pool: Any, place: str) -> RemotePool:
    made = RemotePool("pool", pool, node_id() if place == "here" else "another node", on_silent=lambda: None)
    if place == "behind a wall":
        made.links.take = lambda **_: None  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("place", "path"), [("here", "mapped"), ("elsewhere", "linked"), ("behind a wall", "streamed")]
)
async def test_blocks_cross_by_the_path_that_there_is(
    make_pool: MakePool, make_probe: MakeProbe, place: str, path: str
) -> None:
    pool = await make_pool()
    await fill(pool, make_probe)
    receiver = Receiver(at(pool, place))
    end = await receiver.result()
    assert end == LoadEnd("", path, NUM_BLOCKS - FIRST, (NUM_BLOCKS - FIRST) * KiB, 0)  # type: ignore[arg-type]
    assert len(receiver.rows) == NUM_BLOCKS - FIRST
    async with asyncio.timeout(10):
        while (await pool.describe.remote()).report.used_bytes:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("place", ["here", "elsewhere", "behind a wall"])
async def test_a_pool_that_is_killed_during_a_transfer_gives_whole_blocks_or_none(
    make_pool: MakePool, make_probe: MakeProbe, place: str
) -> None:
    pool = await make_pool()
    await fill(pool, make_probe)
    receiver = Receiver(at(pool, place), waits=True)
    async with asyncio.timeout(20):
        await receiver.first_piece.wait()
    os.kill((await pool.describe.remote()).pid, signal.SIGKILL)
    receiver.go_on.set()
    end = await receiver.result()
    assert (len(receiver.rows), end.num_damaged) == (end.num_blocks, 0)
    # Its arena stays mapped; what was asked of the actor when it died is computed.
    assert end.num_blocks == NUM_BLOCKS - FIRST if place == "here" else end.num_blocks >= 4
    await await_pool(pool)


async def test_what_is_held_stays_when_the_pool_is_killed_and_is_given_back_in_time(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool(arena_bytes=64 * KiB)
    probe = await fill(pool, make_probe)
    held = msgspec.msgpack.decode(await pool.hold.remote(hold("kept", 30.0)), type=HoldReply).held
    os.kill((await pool.describe.remote()).pid, signal.SIGKILL)
    assert isinstance(await probe.admit.remote("all", 60, 7), Wait), "the held blocks are not given away"
    found = await pool.read_blocks.remote(HoldId("kept"), 0, NUM_BLOCKS)
    assert [set(row.tolist()) for row in found.data_NB] == [{number} for number in range(len(held.blocks))]
    await pool.unhold.remote([HoldId("kept")])
    assert isinstance(await probe.wait_event.remote(30.0), Granted)
    await probe.release.remote("all")


async def test_a_reader_that_never_lets_go_is_forgotten(make_pool: MakePool, make_probe: MakeProbe) -> None:
    pool = await make_pool()
    await fill(pool, make_probe)
    await pool.hold.remote(hold("lost", 0.3))
    async with asyncio.timeout(20):
        while (await pool.describe.remote()).report.used_bytes:
            await asyncio.sleep(0.05)
    assert await pool.read_blocks.remote(HoldId("lost"), 0, 1) is None


def hold(name: str, seconds: float) -> bytes:
    command = Hold(
        lease_id=LeaseId(""), hold_id=HoldId(name), namespace_id=ORDER.namespace_id, fingerprint=ORDER.fingerprint,
        hashes=ORDER.hashes, hold_s=seconds,
    )  # fmt: skip
    return msgspec.msgpack.encode(command)


async def test_pools_are_found_by_name_and_one_that_is_not_there_is_a_miss(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool()
    await fill(pool, make_probe)
    (entry,) = [
        each
        for each in ray.util.list_named_actors(all_namespaces=True)
        if ray.get_actor(each["name"], namespace=each["namespace"])._actor_id == pool._actor_id
    ]
    readers = PoolReaders(entry["namespace"].removeprefix("remora-"), node_id())
    found = await asyncio.to_thread(readers.find, KVSource(pool_id=PoolId("p"), actor_name=entry["name"]))
    assert (await Receiver(found).result()).num_blocks == NUM_BLOCKS - FIRST
    with pytest.raises(Unavailable, match="no pool actor"):
        readers.find(KVSource(pool_id=PoolId("p"), actor_name="pool-nowhere"))


async def test_what_a_pool_holds_for_a_reader_already_is_read_as_far_as_it_is_wanted(
    make_pool: MakePool, make_probe: MakeProbe
) -> None:
    pool = await make_pool()
    await fill(pool, make_probe)
    held = msgspec.msgpack.decode(await pool.hold.remote(hold("order", 30.0)), type=HoldReply).held
    for place in ("elsewhere", "behind a wall"):
        end = await Receiver(HeldPool(at(pool, place), HeldThere(hold_id=HoldId("order"), held=held))).result()
        assert (end.num_blocks, end.problem) == (NUM_BLOCKS - FIRST, "")
    assert (await pool.describe.remote()).report.used_bytes, "the pool itself lets go"
    await pool.unhold.remote([HoldId("order")])
    end = await Receiver(HeldPool(at(pool, "elsewhere"), HeldThere(hold_id=HoldId("order"), held=held))).result()
    assert (end.num_blocks, "not held any more" in end.problem) == (0, True)
