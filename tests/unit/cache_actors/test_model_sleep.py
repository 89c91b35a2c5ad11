"""Models go to sleep when all of their replicas want to, and however many ask are woken once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.unit.cache_actors.test_registry_state import record as replica_record

from remora.cache_actors.model_sleep import ModelSleep
from remora.cache_actors.registry_state import ReplicaLoad, ReplicaRecord
from remora.platform.base.errors import Conflict, Unavailable
from remora.platform.base.ids import ModelId, ReplicaId

MODEL = ModelId("tiny")


class Serve:
    """Runs two replicas at first, and remembers what it was told; it takes a moment to answer."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.num_replicas = 2
        self.error: Exception | None = None

    async def wanted(self, app_name: str, model_id: ModelId) -> int:
        assert (app_name, model_id) == ("app", MODEL)
        await asyncio.sleep(0.002)
        return self.num_replicas

    async def scale(self, app_name: str, model_id: ModelId, num_replicas: int) -> None:
        assert (app_name, model_id) == ("app", MODEL)
        await asyncio.sleep(0.002)
        if self.error is not None:
            raise self.error
        self.num_replicas = num_replicas
        self.told.append(num_replicas)


def record(name: str, *, wants_sleep: bool = True, status: Any = "ready", num_running: int = 0) -> ReplicaRecord:
    load = ReplicaLoad(wants_sleep=wants_sleep, num_running=num_running)
    return msgspec.structs.replace(replica_record(name, model=MODEL), app_name="app", status=status, load=load)


async def test_a_model_sleeps_when_all_its_replicas_want_to_and_however_many_ask_are_told_of_one_wake() -> None:
    serve = Serve()
    sleep = ModelSleep(serve)
    await sleep.look(MODEL, [record("a"), record("b", wants_sleep=False)])
    for status in ("draining", "lost"):
        await sleep.look(MODEL, [record("a"), record("b", status=status)])
    await sleep.look(MODEL, [])
    assert serve.told == []
    await sleep.look(MODEL, [record("a"), record("b")])
    assert serve.told == [0]
    answers = await asyncio.gather(*(sleep.wake("app", MODEL, 2) for _ in range(5)))
    assert sorted(answers) == [False] * 4 + [True]
    assert serve.told == [0, 2]
    sleep.check_integrity()


async def test_what_a_stopping_replica_still_says_does_not_put_the_woken_model_to_sleep_again() -> None:
    serve = Serve()
    sleep = ModelSleep(serve)
    await sleep.look(MODEL, [record("old")])
    assert await sleep.wake("app", MODEL, 1)
    await sleep.look(MODEL, [record("old")])
    await sleep.look(MODEL, [record("old"), record("new", wants_sleep=False)])
    assert serve.told == [0, 1]
    sleep.forget(ReplicaId("old"))
    await sleep.look(MODEL, [record("new")])
    assert serve.told == [0, 1, 0]


async def test_a_wake_and_a_sleep_that_cross_leave_the_model_awake() -> None:
    serve = Serve()
    sleep = ModelSleep(serve)
    await asyncio.gather(sleep.look(MODEL, [record("a")]), sleep.wake("app", MODEL, 1))
    assert serve.told == [0, 1]
    await asyncio.gather(sleep.wake("app", MODEL, 1), sleep.look(MODEL, [record("b")]))
    assert serve.told == [0, 1]


async def test_a_model_with_work_or_that_is_starting_is_not_put_to_sleep_by_hand() -> None:
    serve = Serve()
    sleep = ModelSleep(serve)
    with pytest.raises(Conflict, match="busy"):
        await sleep.sleep_now(
            "app", MODEL, [record("a", wants_sleep=False), record("b", wants_sleep=False, num_running=1)]
        )
    await sleep.sleep_now("app", MODEL, [record("a", wants_sleep=False)])
    await sleep.sleep_now("app", MODEL, [record("a")])
    assert serve.told == [0], "it sleeps already"
    # A new configuration starts the replicas without being asked here, and says how many.
    serve.num_replicas = 3
    with pytest.raises(Conflict, match="starting"):
        await sleep.sleep_now("app", MODEL, [record("a")])
    await sleep.look(MODEL, [record("new", wants_sleep=False)])
    assert not await sleep.wake("app", MODEL, 1)
    assert serve.num_replicas == 3


async def test_a_registry_that_has_forgotten_everything_wakes_what_serve_says_sleeps() -> None:
    serve = Serve()
    serve.num_replicas = 0
    assert await ModelSleep(serve).wake("app", MODEL, 2)
    assert not await ModelSleep(serve).wake("app", MODEL, 2)
    assert serve.told == [2]


async def test_an_application_that_may_not_be_scaled_is_told_once_and_what_serve_does_not_answer_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    serve = Serve()
    sleep = ModelSleep(serve)
    serve.error = Unavailable("no controller")
    for _ in range(2):
        await sleep.look(MODEL, [record("a")])
    serve.error = Conflict("say external_scaler_enabled: true")
    for _ in range(3):
        await sleep.look(MODEL, [record("a")])
    assert [entry.message for entry in caplog.records] == [
        *["model tiny stays awake: no controller"] * 2,
        "model tiny stays awake: say external_scaler_enabled: true",
    ]
    serve.error = None
    await sleep.look(MODEL, [msgspec.structs.replace(record("a"), replica_id=ReplicaId("of the next configuration"))])
    assert serve.told == [0]
    sleep.check_integrity()
