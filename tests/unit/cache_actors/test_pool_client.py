"""The pool client against a real pool actor whose calls are lost in every way a crash can lose them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pool_helpers import BLOCK_TOKENS, Handle, KiB, geometry, set_quota, settings

from remora.cache_actors import loop_link, pool_call_link
from remora.cache_actors.kv_sequences import KVSequences
from remora.cache_actors.loop_link import LoopLink
from remora.cache_actors.pool_actor import PoolActor
from remora.cache_actors.pool_call_link import PoolCallServer
from remora.cache_actors.pool_calls import ask_kv_formats
from remora.cache_actors.pool_client import PoolClient
from remora.kernels.layout import V_SIDE, BlockLayout
from remora.kernels.mover import KVMover
from remora.namespaces.commands import (
    Admit,
    Admitted,
    AnyAnswer,
    AnyEvent,
    Granted,
    Refused,
    Release,
    Released,
    Wait,
)
from remora.platform.base.errors import Conflict, PoolError, UnknownSequence
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId, ReplicaId, SequenceId

UNSTAMPED = LeaseId("")


@pytest.fixture
async def handle(tmp_path: Path) -> AsyncIterator[Handle]:
    actor = PoolActor(settings(tmp_path, arena_bytes=64 * KiB))
    handle = Handle(actor)
    yield handle
    await handle.actor.check_integrity()
    await handle.actor.retire()


async def attach(handle: Handle, name: str = "r", **options: Any) -> PoolClient:
    return await PoolClient.attach(
        handle, replica_id=ReplicaId(name), model_id=ModelId("m"), geometry=geometry(), fingerprint=b"f", **options
    )


def admit(name: str, num_blocks: int) -> Admit:
    return Admit(
        lease_id=UNSTAMPED,
        sequence_id=SequenceId(name),
        namespace_id=NamespaceId("a"),
        hashes=(),
        num_tokens=num_blocks * BLOCK_TOKENS,
        num_blocks=num_blocks,
        max_blocks=num_blocks,
    )


def release(*names: str) -> Release:
    return Release(lease_id=UNSTAMPED, sequence_ids=tuple(SequenceId(name) for name in names))


class Log:
    """Everything a client delivers, in order."""

    def __init__(self, client: PoolClient) -> None:
        self.items: list[tuple[Any, AnyAnswer] | AnyEvent] = []
        client.bind(lambda command, answer: self.items.append((command, answer)), self.items.append)

    @property
    def answers(self) -> list[tuple[Any, AnyAnswer]]:
        return [item for item in self.items if isinstance(item, tuple)]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.items) < count:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("loss", [0.0, 0.3])
async def test_every_command_of_every_thread_is_answered_once_in_order(handle: Handle, loss: float) -> None:
    client = await attach(handle)
    log = Log(client)
    handle.loss = loss

    def engine(thread_no: int) -> None:
        for number in range(100):
            client.send(admit(f"s{thread_no}.{number}", 1))
            client.send(release(f"s{thread_no}.{number}"))

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    await log.until(600)
    for thread in threads:
        thread.join()
    assert [command.call_no for command, _ in log.answers] == list(range(2, 602))
    assert not any(isinstance(answer, Refused) for _, answer in log.answers)
    assert client.may_emit()
    handle.loss = 0.0
    assert (await handle.actor.describe()).report.used_bytes == 0
    await client.detach()
    assert await handle.actor.leases() == ()


@pytest.fixture
def linked(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Handle:
    """A pool that is called over links."""
    monkeypatch.setattr(loop_link, "node_ip", lambda: "127.0.0.1")
    handle.has_links = True
    return handle


async def test_calls_go_over_a_link_and_through_ray_where_there_is_none(
    linked: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await attach(linked)
    log = Log(client)
    before = linked.num_rpcs
    for number in range(20):
        client.send(release(f"s{number}"))
        await log.until(number + 1)
    assert linked.num_rpcs <= before + 1, "the one that waits for events"
    linked.has_links = False
    break_links(linked)
    for number in range(20):
        client.send(admit(f"t{number}", 1))
        await log.until(21 + number)
    assert linked.num_rpcs > before + 15
    linked.has_links = True
    client.send(admit("u", 1))
    await log.until(41)
    assert not links_of(linked), "a pool that had none is not asked for one each time"
    monkeypatch.setattr(client._calls, "_silent_until_s", 0.0)
    for number in range(2):
        client.send(admit(f"v{number}", 1))
        await log.until(42 + number)
    assert links_of(linked)
    assert not any(isinstance(answer, Refused) for _, answer in log.answers)
    await client.detach()
    async with asyncio.timeout(5):
        while links_of(linked):
            await asyncio.sleep(0.005)


async def test_nothing_is_lost_or_done_twice_when_links_break_under_calls(
    linked: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side hangs up at random, before a call has come, while it is done, and before its answer has come."""
    client = await attach(linked)
    log = Log(client)
    monkeypatch.setattr(pool_call_link, "_RETRY_S", 0.0)
    linked.loss = 0.1
    answer = PoolCallServer._answer
    num_calls = 0

    async def break_sometimes(server: PoolCallServer, topic: int, data: bytes) -> bytes:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            break_links(linked)
        reply = await answer(server, topic, data)
        if num_calls % 3 == 1:
            break_links(linked)
        return reply

    monkeypatch.setattr(PoolCallServer, "_answer", break_sometimes)
    break_links(linked)
    for number in range(150):
        client.send(admit(f"s{number}", 1))
        client.send(release(f"s{number}"))
        await asyncio.sleep(0.001 * (number % 3))
    await log.until(300)
    assert num_calls > 20
    assert [command.call_no for command, _ in log.answers] == list(range(2, 302))
    assert all(isinstance(answer, Admitted | Released) for _, answer in log.answers)
    assert sum(answer.num_released for _, answer in log.answers if isinstance(answer, Released)) == 150
    linked.loss = 0.0
    assert (await linked.actor.describe()).report.used_bytes == 0
    await client.detach()


def links_of(handle: Handle) -> list[LoopLink]:
    """Those that leases have to the pool now."""
    return [link for link in handle.actor._calls.links._links if link.is_open]


def break_links(handle: Handle) -> None:
    for link in links_of(handle):
        assert link._transport is not None
        link._transport.abort()


async def test_what_is_queued_together_travels_together(handle: Handle) -> None:
    client = await attach(handle)
    log = Log(client)
    before = handle.num_rpcs
    for number in range(50):
        client.send(admit(f"s{number}", 1))
    await log.until(50)
    assert handle.num_rpcs - before <= 3
    await client.detach()


async def test_an_event_never_overtakes_the_answer_it_follows(handle: Handle) -> None:
    clients = [await attach(handle, f"r{number}") for number in range(2)]
    logs = [Log(client) for client in clients]
    handle.loss = 0.2
    for round_no in range(60):
        clients[0].send(admit(f"big{round_no}", 64))
        clients[1].send(admit(f"next{round_no}", 64))
        await asyncio.sleep(0.001 * (round_no % 3))
        clients[0].send(release(f"big{round_no}"))
        clients[1].send(release(f"next{round_no}"))
    await asyncio.gather(*(log.until(120) for log in logs))
    handle.loss = 0.0
    for log in logs:
        waiting: set[SequenceId] = set()
        for item in log.items:
            if isinstance(item, tuple) and isinstance(item[1], Wait):
                waiting.add(item[1].sequence_id)
            elif isinstance(item, Granted):
                assert item.admitted.sequence_id in waiting, "granted before it was said to wait"
                waiting.remove(item.admitted.sequence_id)
        numbers = [item.event_no for item in log.items if not isinstance(item, tuple)]
        assert numbers == sorted(set(numbers))
    for client in clients:
        await client.detach()


async def test_after_a_crash_of_the_pool_the_client_goes_on_with_its_numbers(handle: Handle) -> None:
    client = await attach(handle)
    log = Log(client)
    client.send(admit("before", 3))
    await log.until(1)
    blocks = log.answers[0][1].blocks  # type: ignore[union-attr]
    client.memory.data[blocks[0] * KiB] = 42
    handle.loss = 1.0
    client.send(admit("during", 2))
    await asyncio.sleep(0.1)
    dead = handle.actor
    for task in dead._tasks:
        task.cancel()
    for watch in dead._watches.values():
        watch.close()
    dead._pool.arena.close()
    dead._pool._journal.close()
    handle.actor, handle.loss = PoolActor(dead._settings), 0.0
    await log.until(2)
    assert isinstance(log.answers[1][1], Admitted)
    assert client.may_emit()
    assert handle.actor._pool.arena.data[blocks[0] * KiB] == 42
    client.send(release("before", "during"))
    await log.until(3)
    assert (await handle.actor.describe()).report.used_bytes == 0
    await client.detach()


async def test_a_lost_lease_is_told_once_and_whatever_is_sent_is_answered(handle: Handle) -> None:
    reasons: list[str] = []
    client = await attach(handle, on_lost=reasons.append)
    log = Log(client)
    # As after a revocation or with a pool that lost its state: the lease is unknown.
    handle.actor._exited(client.lease_id)
    async with asyncio.timeout(10):
        while not reasons:
            await asyncio.sleep(0.01)
    assert not client.may_emit()
    client.send(admit("s", 1))
    client.send(release("s"))
    await log.until(2)
    assert all(isinstance(answer, Refused) for _, answer in log.answers)
    assert len(reasons) == 1
    await client.detach()


async def test_a_refused_attach_says_why_and_leaves_nothing(handle: Handle) -> None:
    with pytest.raises(PoolError, match="refuses replica big"):
        await attach(handle, "big", reserved_bytes=1 << 60)
    assert await handle.actor.leases() == ()


async def test_a_lease_sees_the_arena_in_each_precision_that_the_pool_takes(handle: Handle) -> None:
    changed = msgspec.structs.replace(set_quota("b", tenant="b"), kv_precision=("int8", "int8"))
    await handle.actor.set_quota(changed)
    assert (await ask_kv_formats(handle, timeout_s=5.0)).precisions == {"a": None, "b": ("int8", "int8")}
    client = await attach(handle)
    view = await client.add_format(geometry().with_precision(("int8", "int8")), b"f8")
    assert (view.geometry.kv_precision, view.data is client.memory.data) == (("int8", "int8"), True)
    with pytest.raises(PoolError, match=r"refuses a precision: .* differ in precision only"):
        await client.add_format(geometry(num_layers=2), b"f2")
    await client.detach()


async def test_nothing_can_be_sent_after_detach(handle: Handle) -> None:
    client = await attach(handle)
    await client.detach()
    assert not client.may_emit()
    with pytest.raises(PoolError, match="given back"):
        client.send(release("s"))


@pytest.mark.parametrize("loss", [0.0, 0.3])
async def test_sequences_are_edited_through_a_client_whatever_calls_are_lost(handle: Handle, loss: float) -> None:
    """Tokens are bytes of V: what is read through the tables is what llama.cpp would have there."""
    client = await attach(handle)
    log = Log(client)
    handle.loss = loss
    kv = BlockLayout(client.memory.geometry).torch_view(client.memory.data)
    sequences = KVSequences(client.ask, KVMover(client.memory, np.ones(8, np.float32)))
    admitted = await client.ask(admit("a", 3))
    assert isinstance(admitted, Admitted)
    tables = {"a": list(admitted.blocks)}
    for position in range(2 * BLOCK_TOKENS + 5):
        block, slot = divmod(position, BLOCK_TOKENS)
        kv[tables["a"][block], 0, V_SIDE, 0, slot, 0] = position

    def read(name: str, count: int) -> list[int]:
        values = torch.cat([kv[block, 0, V_SIDE, 0, :, 0] for block in tables[name]])
        return [int(value) for value in values[:count]]

    a, b = SequenceId("a"), SequenceId("b")
    length = 2 * BLOCK_TOKENS + 5
    forked = await sequences.seq_cp(a, b, num_tokens=length)
    tables["b"] = tables["a"][: forked.num_kept_blocks] + list(forked.blocks)
    edited = await sequences.seq_rm(a, 3, 10, close_gap=True, num_tokens=length)
    tables["a"] = tables["a"][: edited.num_kept_blocks] + list(edited.blocks)
    everything = list(range(length))
    assert read("a", length - 7) == everything[:3] + everything[10:]
    assert read("b", length) == everything
    assert await sequences.seq_pos_max(a) == length - 8
    assert await sequences.seq_pos_min(b) == 0
    with pytest.raises(Conflict):
        await sequences.seq_cp(a, b)
    with pytest.raises(UnknownSequence):
        await sequences.seq_rm(SequenceId("nobody"))
    assert await sequences.seq_keep(a) == 1
    assert (await sequences.clear(data=True)).num_sequences == 1
    assert not kv[tables["a"]].any()
    assert log.items == [], "answers that were asked for go nowhere else"
    handle.loss = 0.0
    await client.detach()
