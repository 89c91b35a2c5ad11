"""Sessions with their store: what was answered is on disk, writers take turns, failures leave nothing half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from remora.cache_actors.session_client import ask
from remora.cache_actors.session_registry import SessionRegistry
from remora.namespaces.session_commands import (
    AbortTurn,
    BeginTurn,
    CommitTurn,
    CreateSession,
    DeleteSession,
    Done,
    ListSessions,
    SessionHead,
    SessionList,
    SessionRefused,
    ShowSession,
    TurnStarted,
)
from remora.namespaces.session_log import pack_tokens, unpack_tokens
from remora.platform.base.errors import Conflict, NotFound, Unavailable
from remora.platform.base.ids import ModelId, NamespaceId, SessionId
from remora.platform.base.sql_state_store import SqlStateStore
from remora.platform.base.state_store import Change

S = SessionId("s")
M = ModelId("m")
Make = Callable[..., SessionRegistry]


class FailingStore:
    """A real store that fails or waits when told to."""

    def __init__(self, store: SqlStateStore) -> None:
        self._store = store
        self.fail = False
        self.batches: list[int] = []

    def write(self, changes: Sequence[Change]) -> None:
        if self.fail:
            raise Unavailable("no space left")
        self._store.write(changes)
        self.batches.append(len(changes))

    def records(self) -> Iterator[tuple[str, bytes]]:
        return self._store.records()

    def value(self, name: str) -> bytes | None:
        return self._store.value(name)

    def close(self) -> None:
        self._store.close()


@pytest.fixture
async def make(database_url: str) -> AsyncIterator[Make]:
    made: list[SessionRegistry] = []

    def make_one(cluster_id: str = "c", stores: list[FailingStore] | None = None, **more: Any) -> SessionRegistry:
        def open_store() -> FailingStore:
            store = FailingStore(SqlStateStore(database_url))
            if stores is not None:
                stores.append(store)
            return store

        made.append(SessionRegistry(open_store, cluster_id=cluster_id, **more))
        return made[-1]

    yield make_one
    for registry in made:
        await registry.close()
        registry.check_integrity()


async def create(registry: SessionRegistry, name: str = "s", **more: Any) -> SessionHead:
    command = CreateSession(
        session_id=SessionId(name), model_id=M, namespace_id=NamespaceId("n"), call_id=name, max_sessions=100, **more
    )
    return await ask(registry, command, SessionHead)


async def begin(registry: SessionRegistry, turn: str, wait_s: float = 0.0) -> TurnStarted:
    return await ask(registry, BeginTurn(session_id=S, turn_id=turn, model_id=M, wait_s=wait_s), TurnStarted)


async def commit(registry: SessionRegistry, started: TurnStarted, turn: str, tokens: list[int]) -> SessionHead:
    command = CommitTurn(
        session_id=S, turn_id=turn, epoch=started.epoch, kind="text",
        prompt_bytes=pack_tokens(tokens), output_bytes=b"",
    )  # fmt: skip
    return await ask(registry, command, SessionHead)


async def tokens_of(registry: SessionRegistry) -> list[int]:
    head = await ask(registry, ShowSession(session_id=S, with_tokens=True), SessionHead)
    return list(unpack_tokens(head.state.token_bytes))


async def test_what_was_answered_is_there_after_a_crash(make: Make) -> None:
    first = make()
    await create(first)
    await commit(first, await begin(first, "t1"), "t1", [1, 2, 3])
    second = make()  # the first is not closed
    assert await tokens_of(second) == [1, 2, 3]


async def test_a_turn_goes_on_over_a_restart_of_the_registry_but_not_of_the_cluster(make: Make) -> None:
    first = make("cluster 1")
    await create(first)
    started = await begin(first, "t1")
    await commit(make("cluster 1"), started, "t1", [1])
    again = await begin(make("cluster 1"), "t2")
    third = make("cluster 2")
    with pytest.raises(Conflict):
        await commit(third, again, "t2", [2])
    assert await tokens_of(third) == [1]
    assert (await begin(third, "t3")).epoch > again.epoch


async def test_writers_that_wait_take_turns_and_lose_nothing(make: Make) -> None:
    registry = make()
    await create(registry)

    async def write(number: int) -> None:
        started = await begin(registry, f"t{number}", wait_s=5.0)
        await asyncio.sleep(0.001)
        await commit(registry, started, f"t{number}", [number])

    await asyncio.gather(*(write(number) for number in range(10)))
    assert await tokens_of(registry) == list(range(10))


async def test_a_writer_that_does_not_wait_conflicts_and_one_that_waits_too_long_too(make: Make) -> None:
    registry = make()
    await create(registry)
    await begin(registry, "t1")
    with pytest.raises(Conflict):
        await begin(registry, "t2")
    with pytest.raises(Conflict):
        await begin(registry, "t3", wait_s=0.05)


async def test_a_writer_that_gave_up_waiting_does_not_get_the_session(make: Make) -> None:
    registry = make()
    await create(registry)
    started = await begin(registry, "t1")
    waiting = asyncio.create_task(
        registry.call(BeginTurn(session_id=S, turn_id="t2", model_id=M, wait_s=5.0)), name="waits"
    )
    await asyncio.sleep(0.02)
    assert await registry.call(AbortTurn(session_id=S, turn_id="t2")) == Done()
    assert isinstance(await waiting, SessionRefused)
    await commit(registry, started, "t1", [1])
    await begin(registry, "t3")


async def test_a_deleted_session_ends_waiting_for_it(make: Make) -> None:
    registry = make()
    await create(registry)
    await begin(registry, "t1")
    waiting = asyncio.create_task(begin(registry, "t2", wait_s=5.0))
    await asyncio.sleep(0.02)
    await ask(registry, DeleteSession(session_id=S), Done)
    with pytest.raises(NotFound):
        await waiting


async def test_commands_that_come_together_share_a_transaction(make: Make) -> None:
    stores: list[FailingStore] = []
    registry = make(stores=stores)
    await registry.call(ListSessions())
    before = len(stores[0].batches)
    await asyncio.gather(*(create(registry, f"s{i}") for i in range(50)))
    assert sum(stores[0].batches[before:]) == 50
    assert len(stores[0].batches) - before <= 3


async def test_a_failed_write_leaves_the_session_as_it_is_on_disk(make: Make) -> None:
    stores: list[FailingStore] = []
    registry = make(stores=stores)
    await create(registry)
    started = await begin(registry, "t1")
    stores[0].fail = True
    with pytest.raises(Unavailable):
        await commit(registry, started, "t1", [1])
    stores[0].fail = False
    assert await tokens_of(registry) == []
    await commit(registry, started, "t1", [1])
    assert await tokens_of(make()) == [1]


async def test_a_turn_that_is_not_durable_is_answered_without_the_disk(make: Make) -> None:
    stores: list[FailingStore] = []
    registry = make(stores=stores)
    await create(registry, durable=False)
    started = await begin(registry, "t1")
    stores[0].fail = True
    assert (await commit(registry, started, "t1", [1])).num_tokens == 1


async def test_sessions_past_their_ttl_go_by_themselves(make: Make) -> None:
    now_s = 1000.0
    registry = make(now_s=lambda: now_s, expire_every_s=0.01)
    await create(registry, "idle", ttl_s=10.0)
    await create(registry, "kept")
    now_s += 11
    await asyncio.sleep(0.1)
    listed = await ask(make(), ListSessions(), SessionList)
    assert [each.state.session_id for each in listed.sessions] == ["kept"]


async def test_pools_are_told_which_sessions_are_gone_whatever_took_them(make: Make) -> None:
    gone: list[str] = []

    async def tell(session_ids: list[SessionId]) -> None:
        gone.extend(session_ids)

    now_s = 1000.0
    registry = make(now_s=lambda: now_s, expire_every_s=0.01, on_removed=tell)
    for name in ("deleted", "kept"):
        await create(registry, name)
    await create(registry, "expired", ttl_s=10.0)
    await ask(registry, DeleteSession(session_id=SessionId("deleted")), Done)
    now_s += 11
    await asyncio.sleep(0.1)
    crowded = CreateSession(
        session_id=SessionId("new"), model_id=M, namespace_id=NamespaceId("n"), call_id="new", max_sessions=1
    )
    await ask(registry, crowded, SessionHead)
    await asyncio.sleep(0.05)
    assert gone == ["deleted", "expired", "kept"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_store_that_cannot_be_opened_is_an_answer_and_is_tried_again(make: Make, database_url: str) -> None:
    blocked = Path(database_url.removeprefix("sqlite:///"))
    blocked.mkdir(parents=True)
    registry = make()
    with pytest.raises(Unavailable):
        await create(registry)
    blocked.rmdir()
    await create(registry)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_turn_is_kept_or_refused_while_the_database_server_is_away(make: Make, postgres_server: Any) -> None:
    registry = make()
    await create(registry)
    await commit(registry, await begin(registry, "t1"), "t1", [1])
    started = await begin(registry, "t2")
    postgres_server.kill()
    with pytest.raises(Unavailable):
        await commit(registry, started, "t2", [2])
    postgres_server.start()
    assert await tokens_of(registry) == [1]
    await commit(registry, started, "t2", [2])
    assert await tokens_of(make()) == [1, 2]
