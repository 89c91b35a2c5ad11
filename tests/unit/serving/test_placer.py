"""What a router learns of the pools' caches, and that a model which gets behind stops no other."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from tests.unit.serving.test_router import job

from remora.deployments import router
from remora.platform.base.errors import OverQuota
from remora.platform.base.ids import ModelId, NamespaceId

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
