"""A namespace gets another KV precision while everything runs: who is asked, who is told, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.serving.test_router import job

from remora.cache_actors.pool_messages import KVFormats
from remora.cache_actors.pool_settings import PoolSettings
from remora.deployments import namespace_formats
from remora.deployments.models.kv_identity import KVIdentity
from remora.deployments.namespace_formats import NamespaceFormats
from remora.deployments.precision_change import change_precision, quantise
from remora.namespaces.geometry import KVGeometry, KVPrecision, LayerGroup
from remora.namespaces.hashing import chain_hashes, chain_root, sharing_domain
from remora.namespaces.quantise_commands import Quantise, Quantised
from remora.platform.base.config import parse_config
from remora.platform.base.errors import Conflict, InvalidRequest, KernelError, ModelError, PoolError, Unavailable
from remora.platform.base.ids import ModelId, NamespaceId

CHAT, TEAM = NamespaceId("chat"), NamespaceId("batch/team-a")
INT8: KVPrecision = ("int8", "int8")


class Pools:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, KVPrecision | None]] = []
        self.commands: list[Quantise] = []

    async def quantise(self, namespace_id: NamespaceId, command: Quantise) -> dict[str, Quantised]:
        self.commands.append(command)
        return {"one": Quantised(num_converted_blocks=1)}

    async def set_quota(self, namespace_id: NamespaceId, change: Any, kv_precision: KVPrecision | None = None) -> None:
        self.told.append((namespace_id, kv_precision))


async def test_replicas_are_asked_then_pools_told_then_new_requests_are_hashed_under_the_new_root(
    cluster: Any, make_replica: Any
) -> None:
    first, second, pools = make_replica("a"), make_replica("b"), Pools()
    await cluster.add(first, second)
    await change_precision(cluster.core, pools, CHAT, INT8, lambda quota: quota)
    assert first.prepared == second.prepared == pools.told == [(CHAT, INT8)]
    await cluster.settle(lambda: cluster.core.fleet.known_card(ModelId("tiny")).of(CHAT).fingerprint == b"int8/int8")
    assert cluster.core.fleet.known_card(ModelId("tiny")).of(TEAM).fingerprint == b"f" * 32
    stream = await cluster.core.open(job("r", prompt=(1, 2, 3, 4, 5), max_tokens=1))
    root = chain_root(b"int8/int8", sharing_domain(CHAT, "", ""))
    assert stream.request.block_hashes == tuple(chain_hashes(root, [1, 2, 3, 4], 4))
    stream.close()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ModelError("namespaces.chat: it failed its gate"), Conflict),
        (KernelError("no kernel"), InvalidRequest),
        (PoolError("no extents"), InvalidRequest),
        (Unavailable("gone"), Unavailable),
    ],
)
async def test_what_a_replica_refuses_changes_nothing(
    cluster: Any, make_replica: Any, raised: Exception, expected: type[Exception]
) -> None:
    willing, unwilling, pools = make_replica("a"), make_replica("b"), Pools()
    unwilling.precision_error = raised
    await cluster.add(willing, unwilling)
    with pytest.raises(expected, match=str(raised)) as caught:
        await change_precision(cluster.core, pools, CHAT, INT8, lambda quota: quota)
    assert getattr(caught.value, "field", None) in ("kv_precision", None)
    assert (pools.told, willing.namespaces) == ([], {})


async def test_a_cache_that_is_not_quantised_becomes_int8_and_stays_what_it_is_the_next_time(
    cluster: Any, make_replica: Any
) -> None:
    first, second, pools = make_replica("a"), make_replica("b"), Pools()
    await cluster.add(first, second)
    assert await quantise(cluster.core, pools, CHAT, None) == (INT8, {"one": Quantised(num_converted_blocks=1)})
    assert first.prepared == second.prepared == pools.told == [(CHAT, INT8)], "new requests have it first"
    (command,) = pools.commands
    assert (command.namespace_id, command.target.geometry.kv_precision) == (CHAT, INT8)
    assert [each.geometry.kv_precision for each in command.sources] == [("bf16", "bf16")]
    await quantise(cluster.core, pools, CHAT, None)
    await quantise(cluster.core, pools, CHAT, INT8)
    assert pools.told == [(CHAT, INT8)], "nothing else changes"
    assert len(pools.commands) == 3


async def test_nothing_is_quantised_to_a_precision_that_failed_its_gate(cluster: Any, make_replica: Any) -> None:
    replica, pools = make_replica("a"), Pools()
    await cluster.add(replica)
    replica.precision_error = ModelError("it failed its gate")
    with pytest.raises(Conflict, match="failed its gate"):
        await quantise(cluster.core, pools, CHAT, ("int4", "int4"))
    assert (pools.told, pools.commands) == ([], [])


async def test_without_a_replica_nobody_can_say_whether_it_can_be_had(cluster: Any) -> None:
    with pytest.raises(Unavailable, match="No replica of 'tiny'"):
        await change_precision(cluster.core, Pools(), CHAT, INT8, lambda quota: quota)


def test_a_configured_precision_is_part_of_what_a_pool_is_told_when_it_starts() -> None:
    namespaces = [{"name": "chat", "model": "m"}, {"name": "batch", "model": "m", "kv_precision": {"v": "int4"}}]
    config = parse_config({"models": [{"name": "m", "source": "unused"}], "namespaces": namespaces})
    quotas = PoolSettings.from_config(config, "cpu0", node_id="n" * 56, session_name="s").quotas
    assert {each.namespace_id: each.kv_precision for each in quotas} == {"chat": None, "batch": ("bf16", "int4")}


# ---- in a replica ----------------------------------------------------------------------------------------------------


class Lease:
    """A lease that takes every precision but fp32."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.memory = SimpleNamespace(geometry=geometry)
        self.added: list[KVPrecision] = []

    async def add_format(self, geometry: KVGeometry, fingerprint: bytes) -> Any:
        if geometry.kv_precision == ("fp32", "fp32"):
            raise PoolError("extents are short")
        await asyncio.sleep(0)
        self.added.append(geometry.kv_precision)
        return SimpleNamespace(geometry=geometry)


class Replica:
    """NamespaceFormats of a model of bf16, with a pool that says `precisions`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, precisions: dict[NamespaceId, KVPrecision | None]) -> None:
        group = LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16)
        geometry = KVGeometry(groups=(group,), block_tokens=16)
        self.precisions = precisions
        self.failed: set[KVPrecision] = set()
        self.lease = Lease(geometry)

        def in_precision(precision: KVPrecision) -> tuple[KVGeometry, bytes]:
            return geometry.with_precision(precision), "/".join(precision).encode()

        def check_gate(config: Any, geometry: KVGeometry, *_: Any, namespace: str) -> None:
            if geometry.kv_precision in self.failed:
                raise ModelError(f"namespaces.{namespace}: it failed its gate")

        monkeypatch.setattr(namespace_formats, "check_gate", check_gate)
        model: Any = SimpleNamespace(
            geometry=geometry,
            fingerprint=b"own",
            in_precision=in_precision,
            kv_identity=KVIdentity(model="m", geometry=geometry, weights_id="w", tokenizer_id="t"),
            decoder=SimpleNamespace(check_geometry=lambda geometry: None),
        )
        lease: Any = self.lease
        config: Any = None
        self.formats = NamespaceFormats(model, config, lease, [CHAT, TEAM], ask=self._ask, state_dir=Path("nowhere"))

    async def _ask(self) -> KVFormats:
        return KVFormats(dict(self.precisions), ())


async def test_a_replica_starts_with_what_the_pool_says_and_attaches_each_precision_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica(monkeypatch, {CHAT: INT8, TEAM: None})
    await replica.formats.start()
    assert replica.lease.added == [INT8]
    cards = replica.formats.cards()
    assert {name: card.fingerprint for name, card in cards.items()} == {CHAT: b"int8/int8", TEAM: b"own"}
    assert cards[CHAT].block_bytes < cards[TEAM].block_bytes
    for each in cards.values():
        assert {taken.kind for taken in each.takes} == {"converted"}
        assert len(each.takes) == 24, "every other precision of K and V"
    replica.precisions[TEAM] = INT8
    await replica.formats.refresh()
    assert replica.lease.added == [INT8]
    assert replica.formats.find(CHAT) is replica.formats.find(TEAM)
    before = replica.formats.version
    await asyncio.gather(replica.formats.refresh(), replica.formats.refresh())
    assert replica.formats.version == before, "nothing changed"


async def test_a_precision_that_is_asked_for_twice_at_once_has_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = Replica(monkeypatch, {}).formats
    first, second = await asyncio.gather(formats.prepare(CHAT, INT8), formats.prepare(TEAM, INT8))
    assert first is second is await formats.prepare(CHAT, INT8)


async def test_a_replica_does_not_start_with_a_precision_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(monkeypatch, {CHAT: INT8})
    replica.failed.add(INT8)
    with pytest.raises(ModelError, match=r"namespaces\.chat"):
        await replica.formats.start()
    replica.precisions[CHAT] = ("fp32", "fp32")
    with pytest.raises(PoolError, match="extents"):
        await replica.formats.start()


async def test_a_running_replica_keeps_what_it_has_when_the_new_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(monkeypatch, {CHAT: INT8})
    await replica.formats.start()
    replica.precisions[CHAT] = ("fp32", "fp32")
    await replica.formats.refresh()
    assert replica.formats.find(CHAT).fingerprint == b"int8/int8"


async def test_a_gate_that_was_failed_since_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(monkeypatch, {CHAT: INT8})
    await replica.formats.start()
    replica.failed.add(INT8)
    with pytest.raises(ModelError, match="team-a"):
        await replica.formats.prepare(TEAM, INT8)
    assert replica.formats.find(TEAM).fingerprint == b"own"
