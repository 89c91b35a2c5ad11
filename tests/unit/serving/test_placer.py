"""What a router learns of the pools' caches, and that a model which gets behind stops no other."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.serving.test_router import job

from remora.deployments import router
from remora.deployments.engine.messages import TokenDelta
from remora.deployments.placement import Candidate
from remora.deployments.placer import Placer
from remora.deployments.request_stream import RequestStream
from remora.namespaces.chains import Chain
from remora.namespaces.hashing import chain_hashes
from remora.namespaces.replication import backup_of
from remora.platform.base.errors import OverQuota
from remora.platform.base.ids import BlockHash, Epoch, ModelId, NamespaceId, PoolId, ReplicaId, RequestId

LONG = tuple(range(40))


async def answered(cluster: Any, name: str, prompt: tuple[int, ...], **more: Any) -> Any:
    """A request of one token that has run to its end; the replica that it ran at."""
    stream = await cluster.core.open(dataclasses.replace(job(name, prompt=prompt, max_tokens=1), **more))
    replica = cluster.replicas[stream.replica_id]
    await cluster.settle(lambda: bool(replica.running))
    await replica.step()
    while await stream.next_deltas():
        pass
    return replica


async def test_a_prompt_goes_where_most_of_it_was_computed_and_no_longer_once_it_is_evicted(
    cluster: Any, make_replica: Any
) -> None:
    replicas = [make_replica(name, pool=f"pool-{name}") for name in "abcd"]
    await cluster.add(*replicas)
    favourite = await answered(cluster, "q1", LONG[:16])
    other = next(each for each in replicas if each is not favourite)
    # Its continuation was computed elsewhere: there is more of it than where its beginning belongs.
    other.num_cached_tokens = 16
    assert await answered(cluster, "q2", LONG[:32], target=other.replica_id) is other
    other.num_cached_tokens = 32
    assert await answered(cluster, "q3", LONG) is other
    # The replica has found nothing this time.
    other.num_cached_tokens = 0
    assert await answered(cluster, "q4", (*LONG, 1, 2, 3, 4)) is other
    favourite.num_cached_tokens = 16
    assert await answered(cluster, "q5", (*LONG[:16], 9, 9, 9, 9)) in (favourite, other)


async def test_a_model_that_gets_behind_stops_no_other(
    cluster: Any, make_replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MAX_OPEN_REQUESTS", 3)
    await cluster.add(make_replica("a"), make_replica("b", model="other"))
    streams = [await cluster.core.open(job(f"q{i}")) for i in range(3)]
    with pytest.raises(OverQuota, match="3 requests of tiny"):
        await cluster.core.open(job("q3"))
    of_other = dataclasses.replace(job("o"), model_id=ModelId("other"), namespace_id=NamespaceId("other"))
    streams.append(await cluster.core.open(of_other))
    streams.pop(0).close()
    streams.append(await cluster.core.open(job("q4")))
    for stream in streams:
        stream.close()
    await asyncio.sleep(0)


ROOT, BLOCK_TOKENS = BlockHash(b"r" * 16), 16


def lost_stream(namespace: str, num_prompt_tokens: int) -> RequestStream:
    """A request whose replica, the only one of its pool, is gone; its client has 80 tokens."""
    prompt = tuple(range(num_prompt_tokens))
    request: Any = SimpleNamespace(
        namespace_id=NamespaceId(namespace),
        prompt_token_ids=prompt,
        block_hashes=tuple(chain_hashes(ROOT, prompt, BLOCK_TOKENS)),
        num_choices=1,
        epoch=Epoch(0),
        sampling=SimpleNamespace(max_tokens=100),
        wants_token_ids=True,
    )
    stream = RequestStream(request, started_s=0.0, on_close=lambda _: None)
    stream.chain_start = (ROOT, BLOCK_TOKENS)
    stream.log.append(
        TokenDelta(
            request_id=RequestId("q"), choice_index=0, epoch=Epoch(0), first_token_index=0, token_ids=tuple(range(80))
        )
    )
    stream.last_replica_id = ReplicaId("lost")
    return stream


@pytest.mark.parametrize("num_prompt_tokens", [5, 40, 100])
def test_a_request_whose_node_is_gone_goes_to_its_backup_and_asks_nobody_who_is_gone(num_prompt_tokens: int) -> None:
    """Also where the prompt alone is shorter than what chooses the backup."""
    pools = [PoolId(f"pool-{letter}") for letter in "abcdefgh"]
    placer = Placer([NamespaceId("twice")])
    for name, pool in [("lost", "pool-lost"), *((f"r-{pool}", pool) for pool in pools)]:
        card: Any = SimpleNamespace(replica_id=ReplicaId(name), pool_id=PoolId(pool), pool_actor_name=f"actor-{pool}")
        placer.sources.note(card)
    tokens = (*range(num_prompt_tokens), *range(80))
    hashes = tuple(chain_hashes(ROOT, tokens, BLOCK_TOKENS))
    backup = backup_of(Chain(NamespaceId("twice"), ModelId("m"), None, b"", hashes), pools)  # type: ignore[arg-type]
    idle = [Candidate(replica_id=ReplicaId(f"r-{pool}"), pool_id=pool, load_tokens=0) for pool in pools]
    stream = lost_stream("twice", num_prompt_tokens)
    choice, _ = placer.choose(stream, idle)
    assert choice.replica_id == f"r-{backup}"
    assert stream.kv_source is None
    # The backup has no room for it: another one reads from there.
    busy = [dataclasses.replace(each, load_tokens=5000 * (each.pool_id == backup)) for each in idle]
    choice, _ = placer.choose(stream, busy)
    assert choice.replica_id != f"r-{backup}"
    assert stream.kv_source is not None
    assert stream.kv_source.pool_id == backup
    # Without copies only the lost pool can have anything.
    stream = lost_stream("once", num_prompt_tokens)
    placer.choose(stream, idle)
    assert stream.kv_source is not None
    assert stream.kv_source.pool_id == "pool-lost"


async def test_what_is_known_of_a_pool_goes_some_time_after_its_last_replica(cluster: Any, make_replica: Any) -> None:
    await cluster.add(make_replica("a", pool="pool-a"), make_replica("b", pool="pool-b"))
    placer = cluster.core.placer
    a, b = ReplicaId("a"), ReplicaId("b")
    for replica in (a, b):
        await answered(cluster, f"q-{replica}", LONG, target=replica)
    now_s = asyncio.get_running_loop().time()

    def known(*listed: ReplicaId, after_s: float) -> set[str]:
        placer.forget_gone(listed, now_s + after_s)
        return set(placer._cached)

    assert known(a, b, after_s=1000) == {"pool-a", "pool-b"}
    assert known(a, after_s=1001) == {"pool-a", "pool-b"}
    assert known(a, after_s=1299) == {"pool-a", "pool-b"}, "a replica that is replaced finds it"
    assert known(a, b, after_s=1300) == {"pool-a", "pool-b"}
    assert known(a, after_s=1301) == {"pool-a", "pool-b"}, "the time begins anew"
    assert known(a, after_s=1602) == {"pool-a"}
