"""Quotas, trimming and compaction over HTTP: what reaches the pools, and what is refused before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from remora.deployments import pool_reports
from remora.deployments.pool_reports import ClusterPools
from remora.namespaces.commands import Compact, Compacted, Quota, SetQuota, Trim, Trimmed
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.pool import PoolState, PoolStateConfig
from remora.namespaces.quantise_commands import KVFormat, Quantise
from remora.platform.base.errors import InvalidRequest, Unavailable
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId
from remora.platform.http.namespaces import QuotaBody

MIB = 1 << 20
CHAT = NamespaceId("chat")


class FakePool:
    """A pool actor's handle over a real pool state."""

    def __init__(self, name: str, arena_bytes: int = 8 * MIB) -> None:
        self.state = PoolState(PoolStateConfig(data_bytes=arena_bytes, extent_bytes=MIB, reserved_bytes=0))
        self.binding = SimpleNamespace(pool_id=name)
        quota = Quota(guaranteed_bytes=MIB, limit_bytes=arena_bytes)
        self._set(SetQuota(lease_id=LeaseId(""), namespace_id=CHAT, model_id=ModelId("m"), quota=quota))

    def _set(self, command: SetQuota) -> Any:
        return self.state.apply(command, 0.0)

    @property
    def describe(self) -> Any:
        return _remote(lambda: SimpleNamespace(binding=self.binding, report=self.state.describe()))

    @property
    def set_quota(self) -> Any:
        return _remote(self._set)

    @property
    def trim(self) -> Any:
        return _remote(lambda name, size: self._set(Trim(lease_id=LeaseId(""), namespace_id=name, target_bytes=size)))

    @property
    def compact(self) -> Any:
        return _remote(lambda name: self._set(Compact(lease_id=LeaseId(""), namespace_id=name)))

    @property
    def quantise(self) -> Any:
        return _remote(lambda name, data: self._set(msgspec.msgpack.decode(data, type=Quantise)))

    @property
    def quota(self) -> Quota:
        return self.state._parts.book.namespaces[CHAT].quota


def _remote(method: Any) -> Any:
    async def call(*args: Any) -> Any:
        return method(*args)

    return SimpleNamespace(remote=call)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[FakePool]:
    found = [FakePool("one"), FakePool("two", 4 * MIB)]
    monkeypatch.setattr(pool_reports, "find_pools", lambda _: found)
    return found


async def test_a_changed_quota_reaches_every_pool_and_leaves_the_rest_as_it_was(pools: list[FakePool]) -> None:
    await ClusterPools("c").set_quota(CHAT, QuotaBody(guaranteed="2MiB").change)
    assert [pool.quota for pool in pools] == [
        Quota(guaranteed_bytes=2 * MIB, limit_bytes=8 * MIB),
        Quota(guaranteed_bytes=2 * MIB, limit_bytes=4 * MIB),
    ]


async def test_a_changed_precision_reaches_every_pool_beside_the_quota(pools: list[FakePool]) -> None:
    await ClusterPools("c").set_quota(CHAT, QuotaBody(weight=2).change, ("int8", "int4"))
    assert [pool.state.kv_precisions() for pool in pools] == [{CHAT: ("int8", "int4")}] * 2
    await ClusterPools("c").set_quota(CHAT, QuotaBody(weight=1).change)
    assert pools[0].state.kv_precisions() == {CHAT: ("int8", "int4")}, "what is not given stays"


async def test_what_one_pool_refuses_no_pool_keeps(pools: list[FakePool]) -> None:
    with pytest.raises(InvalidRequest, match="guaranteed"):
        await ClusterPools("c").set_quota(CHAT, QuotaBody(guaranteed="6MiB").change)
    assert [pool.quota.guaranteed_bytes for pool in pools] == [MIB, MIB]


async def test_every_pool_says_what_trimming_and_compacting_did(pools: list[FakePool]) -> None:
    nothing = Trimmed(trimmed_bytes=0, num_released_extents=0)
    assert await ClusterPools("c").trim(CHAT, 0) == {"one": nothing, "two": nothing}
    assert await ClusterPools("c").compact(CHAT) == {"one": Compacted(), "two": Compacted()}


async def test_a_pool_that_does_not_re_encode_says_why(pools: list[FakePool]) -> None:
    geometry = KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=4)
    target = KVFormat(geometry=geometry, fingerprint=b"f")
    command = Quantise(lease_id=LeaseId(""), namespace_id=CHAT, target=target, sources=())
    with pytest.raises(InvalidRequest, match="not the precision that namespace 'chat' has"):
        await ClusterPools("c").quantise(CHAT, command)


@pytest.mark.parametrize(("path", "body"), [("trim", {}), ("trim", {"to": "1MiB"}), ("compact", {}), ("quantize", {})])
async def test_trimming_and_compacting_are_posts(http: Any, path: str, body: dict[str, Any]) -> None:
    assert (await http.post(f"/v1/namespaces/batch/team-a/{path}", json=body)).status_code == 503
    assert (await http.post(f"/v1/namespaces/nobody/{path}", json=body)).status_code == 404
    wrong = await http.post(f"/v1/namespaces/chat/{path}", json={"upto": 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "upto")


async def test_without_a_pool_that_has_the_namespace_the_answer_is_to_try_again(pools: list[FakePool]) -> None:
    pools.clear()
    with pytest.raises(Unavailable):
        await ClusterPools("c").set_quota(CHAT, QuotaBody(weight=2).change)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, None),
        ({"guaranteed": -1}, 400, "guaranteed"),
        ({"limit": "much"}, 400, "limit"),
        ({"weight": 0}, 400, "weight"),
        ({"size": 1}, 400, "size"),
        ({"kv_precision": "int3"}, 400, "kv_precision"),
        ({"kv_precision": {"k": "int8", "q": "int8"}}, 400, "kv_precision.q"),
        ({"weight": 2, "tier": "host"}, 400, "tier"),
        ({"weight": 2, "tier": "device"}, 503, None),
        ({"limit": "1MiB"}, 503, None),
    ],
)
async def test_a_wrong_quota_names_its_field(http: Any, body: dict[str, Any], status: int, field: str | None) -> None:
    answer = await asyncio.wait_for(http.put("/v1/namespaces/batch/team-a", json=body), 10)
    assert answer.status_code == status
    if field is not None:
        assert answer.json()["error"]["param"] == field


async def test_an_unknown_namespace_is_not_found(http: Any) -> None:
    assert (await http.put("/v1/namespaces/nobody", json={"weight": 2})).status_code == 404


async def test_a_quota_is_said_by_tier(http: Any) -> None:
    document = (await http.get("/v1/namespaces/batch/team-a")).json()
    quota = {key: document[key] for key in ("guaranteed_bytes", "limit_bytes", "weight")}
    assert document["tiers"] == {"device": quota}
