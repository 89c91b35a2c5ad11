"""Whose KV a session goes on behind with another model: decided by fingerprints, said per range, kept in its log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.serving.test_router import step_until_done

from remora.deployments.model_card import NamespaceCard
from remora.namespaces.edits import Edits, derived
from remora.namespaces.hashing import Derivation
from remora.platform.base.ids import NamespaceId

TURN = {"seed": 1, "session_id": "s", "max_tokens": 6, "messages": [{"role": "user", "content": "go"}]}
SOURCE = b"f" * 32
ADOPTED, CONVERTED = (Derivation(kind=kind, fingerprint=SOURCE) for kind in ("adopted", "converted"))


class Pools:
    """Which pool has how many blocks, by namespace."""

    def __init__(self, **found: dict[str, int]) -> None:
        self.found = found

    async def find_blocks(self, namespace_id: str, fingerprint: bytes, hashes: Any) -> dict[str, int]:
        return {pool: min(count, len(hashes)) for pool, count in self.found.get(namespace_id, {}).items()}


class World:
    """Model "tiny" with a session in pool-a, and model "other" in pool-b."""

    def __init__(self, server: Any, http: Any, other: Any) -> None:
        self.server, self.http, self.other = server, http, other

    def has(self, **found: dict[str, int]) -> None:
        self.server.pools.find_blocks = Pools(**found).find_blocks

    async def takes(self, *derivations: Derivation, fingerprint: bytes = b"g" * 32) -> None:
        """The other model's KV is another, and it takes this over."""
        card = NamespaceCard(fingerprint=fingerprint, block_bytes=256, takes=derivations)
        self.other.namespaces, self.other.card_no = {NamespaceId("other"): card}, self.other.card_no + 1
        fleet = self.server.core.fleet
        await self.server.cluster.settle(lambda: fleet.known_card("other").of("other") == card)

    async def move(self, model: str = "other", **finds: int) -> dict[str, Any]:
        for name, value in finds.items():
            setattr(self.other, name, value)
        response = await self.http.post("/v1/sessions/s/migrate", json={"to": {"model": model}})
        assert response.status_code == 200, response.text
        moved: dict[str, Any] = response.json()
        assert sum(moved["tokens"].values()) == moved["ranges"][-1]["to"] == await self.length()
        return moved

    async def length(self) -> int:
        return int((await self.http.get("/v1/sessions/s")).json()["num_tokens"])

    async def edits(self) -> list[tuple[int, str]]:
        session = (await self.http.get("/v1/sessions/s")).json()
        return [(each["position"], each["kind"]) for each in session["edits"]]

    @property
    def brought(self) -> Any:
        """What the other model was last asked to bring."""
        return self.other.submitted[-1]


@pytest.fixture
async def world(server: Any, make_replica: Any, http: Any) -> AsyncIterator[World]:
    other = make_replica("b", model="other", pool="pool-b")
    await server.cluster.add(other)
    stepping = asyncio.create_task(step_until_done(other))
    await http.post("/v1/sessions", json={"id": "s", "model": "tiny"})
    await http.post("/v1/chat/completions", json={**TURN, "model": "tiny"})
    yield World(server, http, other)
    stepping.cancel()


def taken(derivation: Derivation, start: int, end: int) -> Edits:
    return derived((), derivation, start, end)


async def test_equal_fingerprints_share_and_copy(world: World) -> None:
    world.has(chat={"pool-a": 5})
    moved = await world.move(num_cached_tokens=20, num_copied_tokens=12)
    assert [(each["from"], each["to"], each["how"]) for each in moved["ranges"]] == [
        (0, 8, "shared"),
        (8, 20, "copied"),
        (20, await world.length(), "recomputed"),
    ]
    assert not any("kv_of" in each for each in moved["ranges"])
    assert world.brought.kv_source.other is None
    assert await world.edits() == []


@pytest.mark.parametrize(("derivation", "how"), [(ADOPTED, "copied"), (CONVERTED, "converted")])
async def test_kv_of_a_compatible_model_or_another_precision_is_taken_over_and_named_so(
    world: World, derivation: Derivation, how: str
) -> None:
    await world.takes(derivation)
    world.has(chat={"pool-a": 5, "pool-b": 3})
    moved = await world.move(num_cached_tokens=20, **{f"num_{how}_tokens": 20})
    length = await world.length()
    assert moved["ranges"] == [
        {"from": 0, "to": 20, "how": how, "kv_of": "tiny"},
        {"from": 20, "to": length, "how": "recomputed"},
    ]
    source = world.brought.kv_source
    assert (source.pool_id, source.actor_name) == ("pool-a", "pool-pool-a"), "the pool that has most"
    assert (source.other.derivation, source.other.namespace_id, source.other.first) == (derivation, "chat", 0)
    assert len(source.other.hashes) == 5
    assert world.brought.context.edits == taken(derivation, 0, 20)
    assert world.brought.num_kept_tokens == 0
    assert await world.edits() == [(0, derivation.kind), (20, "recomputed")]
    answer = await world.http.post("/v1/chat/completions", json={**TURN, "model": "other"})
    assert answer.status_code == 200, answer.text
    assert world.brought.context.edits == taken(derivation, 0, 20), "the next turn finds it by that name"


async def test_what_the_other_model_has_itself_is_not_taken_over(world: World) -> None:
    await world.takes(ADOPTED)
    world.has(chat={"pool-a": 5}, other={"pool-b": 2})
    moved = await world.move(num_cached_tokens=20, num_copied_tokens=12)
    assert [tuple(each.values()) for each in moved["ranges"][:2]] == [(0, 8, "shared"), (8, 20, "copied", "tiny")]
    assert world.brought.kv_source.other.first == 2
    assert await world.edits() == [(8, "adopted"), (20, "recomputed")]
    world.has(chat={"pool-a": 5}, other={"pool-b": 5})
    fork = {"id": "t", "model": "tiny"}
    assert (await world.http.post("/v1/sessions/s/fork", json=fork)).status_code == 200


async def test_kv_that_nobody_declared_or_that_is_gone_is_computed(world: World) -> None:
    await world.takes()
    world.has(chat={"pool-a": 5})
    moved = await world.move(num_cached_tokens=0)
    assert [each["how"] for each in moved["ranges"]] == ["recomputed"]
    assert (world.brought.kv_source.other, world.brought.context, await world.edits()) == (None, None, [])


@pytest.mark.parametrize("found", [{}, {"pool-z": 5}])
async def test_kv_that_no_pool_has_or_that_is_in_a_pool_nobody_knows_is_computed(
    world: World, found: dict[str, int]
) -> None:
    await world.takes(ADOPTED)
    world.has(chat=found)
    moved = await world.move(num_cached_tokens=0)
    assert [each["how"] for each in moved["ranges"]] == ["recomputed"]
    assert await world.edits() == []


async def test_kv_that_was_taken_over_is_not_taken_over_again(world: World) -> None:
    await world.takes(ADOPTED)
    world.has(chat={"pool-a": 5})
    await world.move(num_cached_tokens=20, num_copied_tokens=20)
    card = NamespaceCard(
        fingerprint=SOURCE, block_bytes=256, takes=(Derivation(kind="adopted", fingerprint=b"g" * 32),)
    )
    replica = world.server.replica
    replica.namespaces, replica.card_no = {NamespaceId("chat"): card}, replica.card_no + 1
    await world.server.cluster.settle(lambda: world.server.core.fleet.known_card("tiny").of("chat") == card)
    world.has(chat={"pool-a": 5}, other={"pool-b": 6})
    replica.num_cached_tokens = 20
    moved = await world.move("tiny")
    assert [tuple(each.values()) for each in moved["ranges"]] == [
        (0, 20, "shared"),
        (20, await world.length(), "recomputed"),
    ]
    assert await world.edits() == [], "it is back behind its own KV"


ASK = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 3}


async def test_branches_of_other_models_share_what_can_be_shared_and_answer_in_one_call(world: World) -> None:
    await world.takes(ADOPTED)
    world.has(chat={"pool-a": 5}, other={})
    world.other.num_cached_tokens = world.other.num_copied_tokens = 20
    length = await world.length()
    branches = [{"seed": 1}, {"model": "other", "seed": 2, "session_id": "o"}, {"model": "other", "keep": False}]
    response = await world.http.post("/v1/sessions/s/fork", json={**ASK, "branches": branches})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    first, second, third = answer["branches"]
    assert "model" not in first
    assert "transfer" not in first
    assert (second["model"], second["session_id"], third["session_id"]) == ("other", "o", None)
    assert second["transfer"] == third["transfer"], "the log was brought once for both"
    assert [tuple(each.values()) for each in second["transfer"]["ranges"]] == [
        (0, 20, "copied", "tiny"),
        (20, length, "recomputed"),
    ]
    brought, *asked = world.other.submitted
    assert brought.kv_source.other is not None
    assert len(asked) == 2, "what was taken over is there: nothing more is computed before"
    assert all(each.context.edits == taken(ADOPTED, 0, 20) for each in asked)
    assert {each.session_id for each in asked} == {"o", None}
    made = (await world.http.get("/v1/sessions/o")).json()
    assert (made["model"], made["parent"], made["num_turns"]) == ("other", "s", 2)
    assert [each["kind"] for each in made["edits"]] == ["adopted", "recomputed"]
    assert (await world.http.get("/v1/sessions/s")).json()["model"] == "tiny"


async def test_a_branch_whose_model_is_not_there_ends_no_other_and_keeps_none_waiting(world: World) -> None:
    world.server.cluster.publish(draining=("b",))
    body = {**ASK, "branches": [{"model": "other"}, {"session_id": "good"}]}
    answer = (await world.http.post("/v1/sessions/s/fork", json=body)).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["error", "length"]
    assert answer["branches"][0]["error"]["code"] == "unavailable"
    assert [each["session_id"] for each in answer["branches"]] == [None, "good"]
