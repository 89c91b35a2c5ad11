"""Running requests that are moved: one stream without a gap or a repeat, whatever happens on the way."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from tests.unit.serving.test_router import job, read, text

from remora.deployments.token_counts import TokenCounts
from remora.platform.base.errors import Conflict, InvalidRequest, Unavailable
from remora.platform.base.ids import ReplicaId


async def running(cluster: Any, *replicas: Any, num_tokens: int = 3, **options: Any) -> tuple[Any, Any, Any]:
    """A request with some tokens, the replica that has it, and the other one."""
    stream = await cluster.core.open(job(**options))
    await cluster.settle(lambda: any(replica.running for replica in replicas))
    source, target = sorted(replicas, key=lambda replica: not replica.running)
    await source.step(num_tokens)
    await cluster.settle(lambda: stream.log.num_tokens == num_tokens * stream.request.num_choices)
    return stream, source, target


@pytest.mark.parametrize("n", [1, 2])
async def test_a_move_within_a_pool_shares_the_blocks_and_the_client_sees_one_text(
    cluster: Any, make_replica: Any, expected_token: Any, n: int
) -> None:
    replicas = make_replica("a"), make_replica("b")
    await cluster.add(*replicas)
    stream, source, target = await running(cluster, *replicas, max_tokens=8, n=n)
    moving = asyncio.create_task(cluster.core.moves.move(stream, target.replica_id))
    if n == 1:
        await cluster.settle(lambda: bool(target.standing_by))
        await source.step()
        await target.step()
        await cluster.settle(lambda: bool(target.resumptions))
        assert source.stopped
        assert len(target.resumptions[0].token_ids) == 1, "what was said while it stood by"
    else:
        await cluster.settle(lambda: bool(target.running))
        assert not source.running, "several choices begin anew"
    await target.step(5)
    moved = await moving
    assert not source.running, "one owner"
    assert (moved.source, moved.replica) == (source.replica_id, target.replica_id)
    assert moved.tokens == TokenCounts(shared=6 if n == 1 else 9)
    (resumed,) = target.submitted
    assert resumed.epoch == 1
    assert resumed.standby_of == (0 if n == 1 else None)
    assert resumed.sampling.seed == source.submitted[0].sampling.seed
    assert await read(stream, n) == [text(expected_token, stream, index) for index in range(n)]
    assert cluster.core.num_open == 0


@pytest.mark.parametrize("max_tokens", [4, 8])
async def test_the_token_of_the_step_in_which_a_freeze_comes_is_part_of_what_is_handed_over(
    cluster: Any, make_replica: Any, expected_token: Any, max_tokens: int
) -> None:
    replicas = make_replica("a"), make_replica("b")
    await cluster.add(*replicas)
    stream, source, target = await running(cluster, *replicas, max_tokens=max_tokens)
    source.is_in_step = True
    moving = asyncio.create_task(cluster.core.moves.move(stream, target.replica_id))
    await cluster.settle(lambda: bool(target.standing_by))
    await target.step()
    if max_tokens == 4:
        with pytest.raises(Conflict, match="ended"):
            await moving
        await cluster.settle(lambda: not target.running)
    else:
        await cluster.settle(lambda: bool(target.resumptions))
        assert len(target.resumptions[0].token_ids) == 1, "nothing else was said since it was sent"
        await target.step(4)
        assert (await moving).replica == target.replica_id
    assert await read(stream) == [text(expected_token, stream)]
    assert cluster.core.num_open == 0


@pytest.mark.parametrize("num_copied", [0, 4])
async def test_a_move_to_another_pool_copies_what_the_source_has_while_that_goes_on(
    cluster: Any, make_replica: Any, expected_token: Any, num_copied: int
) -> None:
    replicas = make_replica("a", pool="p"), make_replica("b", pool="q")
    await cluster.add(*replicas)
    stream, source, target = await running(cluster, *replicas, max_tokens=16)
    assert source.submitted[0].kv_source is None
    target.num_cached_tokens = target.num_copied_tokens = num_copied
    moving = asyncio.create_task(cluster.core.moves.move(stream, target.replica_id))
    await cluster.settle(lambda: target.running)
    first = target.submitted[0]
    assert len(first.prompt_token_ids) == 5, "the full block of the prompt and the output so far, and one token"
    await source.step(6)
    await cluster.settle(lambda: stream.log.num_tokens == 9)
    await target.step(1)
    await cluster.settle(lambda: len(target.submitted) == 2)
    target.num_cached_tokens = 2 * num_copied
    second = target.submitted[1]
    assert len(second.prompt_token_ids) == 9, "a block is new: another round"
    await target.step(1)
    await cluster.settle(lambda: len(target.submitted) == 3)
    target.num_copied_tokens = 0
    await target.step(1)
    await cluster.settle(lambda: bool(target.resumptions))
    assert source.stopped, "less than a block is new: frozen"
    last = target.submitted[2]
    assert last.output_token_ids == stream.log.token_ids()
    assert [each.kv_source.pool_id for each in (first, second, last)] == [source.pool_id] * 3
    await target.step(7)
    assert (await moving).tokens == TokenCounts(copied=2 * num_copied, recomputed=12 - 2 * num_copied)
    assert not source.running
    assert await read(stream) == [text(expected_token, stream)]


async def test_a_request_that_goes_on_elsewhere_finds_its_blocks_by_the_pool_it_comes_from(
    cluster: Any, make_replica: Any
) -> None:
    replicas = make_replica("a", pool="p"), make_replica("b", pool="q")
    await cluster.add(*replicas)
    stream, source, other = await running(cluster, *replicas)
    source.kill()
    await cluster.settle(lambda: other.running)
    (resumed,) = other.submitted
    assert resumed.kv_source.pool_id == source.pool_id, "its pool outlives it"
    stream.close()
    turn = await cluster.core.open(_of_owner("next", source.replica_id))
    await cluster.settle(lambda: len(other.submitted) == 2)
    assert other.submitted[1].kv_source.pool_id == source.pool_id, "as does the session's next turn"
    turn.close()


async def test_a_standby_never_ends_the_attempt_that_it_stands_by(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    """A pool ends what runs under an older epoch of a session than it is told: each move keeps the first one's."""
    replicas = make_replica("a"), make_replica("b")
    await cluster.add(*replicas)
    stream, source, target = await running(cluster, *replicas, max_tokens=30)
    for _ in range(3):
        moving = asyncio.create_task(cluster.core.moves.move(stream, target.replica_id))
        while not moving.done():
            await source.step()
            await target.step()
        await moving
        source, target = target, source
    sent = [request for replica in replicas for request in replica.submitted if request.standby_of is not None]
    assert [request.standby_of for request in sent] == [0, 0, 0]
    source.kill()
    await cluster.settle(lambda: bool(target.running))
    assert target.submitted[-1].epoch == stream.epoch > 3, "a failover ends them all"
    await target.step(30)
    assert await read(stream) == [text(expected_token, stream)]


async def test_tokens_of_the_step_in_which_a_request_stops_do_not_end_its_pause(
    cluster: Any, make_replica: Any
) -> None:
    replicas = make_replica("a"), make_replica("b")
    await cluster.add(*replicas)
    stream, source, _ = await running(cluster, *replicas, max_tokens=30)
    landing, _ = stream.take_off(source.replica_id), stream.freeze()
    await source.step()
    await cluster.settle(lambda: stream.log.num_tokens == 4)
    assert stream.is_landing
    stream.frozen(None)
    await source.step()
    await cluster.settle(landing.done)
    stream.close()


async def test_a_target_that_refuses_leaves_the_request_where_it_is(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    replicas = make_replica("a"), make_replica("b")
    await cluster.add(*replicas)
    stream, source, target = await running(cluster, *replicas, max_tokens=6)
    target.error = {"error": "OverQuota", "error_message": "no room", "retry_after_s": 1.0}
    with pytest.raises(Unavailable, match="no room"):
        await cluster.core.moves.move(stream, target.replica_id)
    assert stream.replica_id == source.replica_id
    assert not source.stopped
    await source.step(3)
    assert await read(stream) == [text(expected_token, stream)]


async def test_a_client_that_leaves_during_a_move_leaves_nothing(cluster: Any, make_replica: Any) -> None:
    replicas = make_replica("a"), make_replica("b")
    await cluster.add(*replicas)
    stream, _source, target = await running(cluster, *replicas)
    moving = asyncio.create_task(cluster.core.moves.move(stream, target.replica_id))
    await cluster.settle(lambda: target.running)
    stream.close()
    with pytest.raises(Conflict):
        await moving
    await cluster.settle(lambda: not target.running)
    assert cluster.core.num_open == 0


async def test_moves_that_make_no_sense_are_refused_and_change_nothing(cluster: Any, make_replica: Any) -> None:
    replicas = make_replica("a"), make_replica("b")
    await cluster.add(*replicas, make_replica("other", model="small"))
    stream, source, target = await running(cluster, *replicas)
    moves = cluster.core.moves
    for name in ("nowhere", "other"):
        with pytest.raises(InvalidRequest, match="to: no replica"):
            await moves.move(stream, ReplicaId(name))
    with pytest.raises(Conflict, match="already"):
        await moves.move(stream, source.replica_id)
    moving = asyncio.create_task(moves.move(stream, target.replica_id))
    await cluster.settle(lambda: target.running)
    with pytest.raises(Conflict, match="already"):
        await moves.move(stream, source.replica_id)
    while not moving.done():
        await target.step()
    await moving
    stream.close()
    with pytest.raises((Conflict, InvalidRequest)):
        await moves.move(stream, source.replica_id)


async def test_a_draining_replica_is_left_and_gets_nothing_new(
    cluster: Any, make_replica: Any, expected_token: Any
) -> None:
    first, second = make_replica("a"), make_replica("b")
    await cluster.add(first)
    streams = [await cluster.core.open(job(f"r{index}", max_tokens=4)) for index in range(10)]
    await cluster.settle(lambda: len(first.running) == 10)
    await first.step(2)
    cluster.publish(draining=[first.replica_id])
    await asyncio.sleep(0.05)
    assert len(first.running) == 10, "without another replica they end where they are"
    cluster.replicas[second.replica_id] = second
    cluster.publish(draining=[first.replica_id])
    async with asyncio.timeout(5):
        while first.running:
            await second.step()
    streams.append(await cluster.core.open(job("new", max_tokens=4)))
    reading = asyncio.gather(*(read(stream) for stream in streams))
    async with asyncio.timeout(5):
        while not reading.done():
            await second.step()
    assert await reading == [[text(expected_token, stream)] for stream in streams]
    assert not first.running
    assert {request.request_id for request in first.submitted}.isdisjoint({"new"})


async def test_a_request_leaves_a_draining_replica_for_another_of_the_pool_that_has_its_blocks(
    cluster: Any, make_replica: Any
) -> None:
    drained, near = make_replica("a", pool="p"), make_replica("b", pool="p")
    far = [make_replica(f"far-{index}", pool=f"far-{index}") for index in range(9)]
    await cluster.add(drained, near, *far)
    made = dataclasses.replace(job(prompt=tuple(range(40))), target=drained.replica_id)
    stream = await cluster.core.open(made)
    await cluster.settle(lambda: bool(drained.running))
    await drained.step()
    await cluster.settle(lambda: stream.log.num_tokens == 1)
    cluster.publish(draining=[drained.replica_id])
    await cluster.settle(lambda: bool(near.running))
    assert not any(replica.submitted for replica in far), "nothing is copied"
    stream.close()


async def test_a_session_goes_to_its_last_replica_unless_that_is_loaded(cluster: Any, make_replica: Any) -> None:
    replicas = [make_replica(name, pool=name) for name in "abc"]
    await cluster.add(*replicas)
    for index, replica in enumerate(replicas):
        stream = await cluster.core.open(_of_owner(f"s{index}", replica.replica_id))
        await cluster.settle(lambda replica=replica: bool(replica.running))
        stream.close()
        await cluster.settle(lambda replica=replica: not replica.running)
    busy = [await cluster.core.open(_of_owner(f"b{index}", ReplicaId("a"))) for index in range(9)]
    await cluster.settle(lambda: sum(len(replica.running) for replica in replicas) == 9)
    assert all(replica.running for replica in replicas), "loaded beyond the bound, others take over"
    for stream in busy:
        stream.close()


def _of_owner(name: str, owner: ReplicaId) -> Any:
    return dataclasses.replace(job(name), owner=owner)
