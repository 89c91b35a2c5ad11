"""A move under which somebody dies, leaves, refuses or hangs, at every stage: one text, one owner, nothing left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serving.conftest import Cluster
from tests.unit.serving.fake_replica import FakeReplica, token_of
from tests.unit.serving.instant_loop import run_instantly
from tests.unit.serving.test_router import job, text

from remora.deployments.request_stream import RequestStream
from remora.platform.base.config import RemoraConfig, parse_config
from remora.platform.base.errors import Conflict, InvalidRequest, Unavailable

STAGES = ("precopy", "standby", "freeze", "tail", "commit", "release")
FAULTS = ("source dies", "target dies", "both die", "source leaves", "target leaves", "refused", "target hangs",
          "source hangs", "client leaves", "caller leaves", "a gap")  # fmt: skip

CONFIG: RemoraConfig = parse_config(
    {
        "http": {"queue_timeout_s": 10.0},
        "models": [{"name": "tiny", "source": "unused"}],
        "namespaces": [{"name": "chat", "model": "tiny"}],
    }
)


class Move:
    """One request with a source, a target and perhaps a third replica, all of which go on by themselves."""

    def __init__(self, *, pools: int, has_spare: bool, num_choices: int) -> None:
        self.cluster = Cluster(CONFIG)
        self.core = self.cluster.core
        self.source, self.target = FakeReplica("a", pool="p"), FakeReplica("b", pool="p" if pools == 1 else "q")
        self.replicas = [self.source, self.target]
        if has_spare:
            self.replicas.append(FakeReplica("c", pool="p"))
        self.num_choices = num_choices
        self.stream: Any = None
        self.moving: Any = None
        self.seen: list[str] = []
        self.fault: tuple[str, str] = ("", "")

    # ---- in place of deployments.move_stages.MoveStages

    async def reach(self, stage: str, session_id: object) -> None:
        self.seen.append(stage)
        if stage == self.fault[1]:
            self.strike()
            await asyncio.sleep(0.02)

    def strike(self) -> None:
        what, self.fault = self.fault[0], ("", "")
        victims = {
            "source": [self.source], "target": [self.target], "both": [self.source, self.target],
        }.get(what.split()[0], [])  # fmt: skip
        for victim in victims:
            if what.endswith(("dies", "die")):
                victim.kill()
            elif what.endswith("leaves"):
                victim.leaving = True
            else:
                victim.frozen = True
        if what == "refused":
            self.target.error = {"error": "OverQuota", "error_message": "no room", "retry_after_s": 1.0}
        elif what == "client leaves":
            self.stream.close()
        elif what == "caller leaves":
            self.moving.cancel()
        elif what == "a gap":
            self.source.drop_next_delta = self.target.drop_next_delta = True

    # ---- the course of events

    async def steps(self, replica: FakeReplica) -> None:
        while True:
            if replica.alive and not replica.frozen:
                replica.error = replica.error if self.core.num_open else None
                await replica.step()
            await asyncio.sleep(0.004)

    async def run(self, fault: str, stage: str, num_tokens: int) -> None:
        await self.cluster.add(self.source)
        self.core.moves._stages = self  # type: ignore[assignment]  # what only files can do otherwise
        made = job(max_tokens=40, n=self.num_choices)
        self.stream = await self.core.open(made)
        await self.cluster.add(*self.replicas)
        stepping = [asyncio.create_task(self.steps(each)) for each in self.replicas]
        reading = asyncio.create_task(_read(self.stream))
        while self.stream.log.num_tokens < num_tokens:
            await asyncio.sleep(0.003)
        self.fault = fault, stage
        for each in self.replicas:
            each.is_in_step = num_tokens % 2 == 1
        self.moving = asyncio.create_task(self.core.moves.move(self.stream, self.target.replica_id))
        if stage == "standby":
            await self.cluster.settle(lambda: bool(self.target.standing_by) or self.moving.done())
            self.strike()
        (outcome,) = await asyncio.gather(self.moving, return_exceptions=True)
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, (Unavailable, Conflict, InvalidRequest, asyncio.CancelledError)), outcome
        elif fault != "client leaves":
            at = self.stream.replica_id
            assert at is None or at == outcome.replica or fault.startswith(("both", "target", "a gap", "refused"))
        texts = await asyncio.wait_for(reading, 100)
        if fault != "client leaves":
            assert texts == [text(token_of, self.stream, index) for index in range(self.num_choices)]
        for each in self.replicas:
            each.frozen = False
        await self.cluster.settle(lambda: not any(each.running for each in self.replicas if each.alive), 20)
        self.core.check_integrity()
        assert self.core.num_open == 0
        for task in stepping:
            task.cancel()
        await self.core.stop()
        for each in self.replicas:
            each.hub.check_integrity()


async def _read(stream: RequestStream) -> list[str]:
    texts = [""] * stream.request.num_choices
    while not stream.closed and (deltas := await _next(stream)):
        for delta in deltas:
            texts[delta.choice_index] += delta.text
    stream.close()
    return texts


async def _next(stream: RequestStream) -> list[Any]:
    while not stream.closed:
        try:
            return await asyncio.wait_for(stream.next_deltas(), 0.5)
        except TimeoutError:
            continue
    return []


CASES = st.fixed_dictionaries(
    {
        "fault": st.sampled_from(FAULTS),
        "stage": st.sampled_from(STAGES),
        "num_tokens": st.integers(1, 12),
        "pools": st.sampled_from([1, 2]),
        "has_spare": st.booleans(),
        "num_choices": st.sampled_from([1, 1, 1, 2]),
    }
)


def _run(case: dict[str, Any]) -> Move:
    case = dict(case)
    course = {key: case.pop(key) for key in ("fault", "stage", "num_tokens")}

    async def run() -> Move:
        # When nobody is left the request waits for a replica: that one comes.
        move = Move(**case)
        if course["fault"] in ("both die", "source dies", "target leaves", "source leaves", "target dies"):
            move.replicas.append(FakeReplica("successor", pool="p"))
        await move.run(**course)
        return move

    return run_instantly(run())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_at_every_stage_leaves_one_text_and_one_owner(fault: str, stage: str) -> None:
    case = {"fault": fault, "stage": stage, "num_tokens": 3, "pools": 2, "has_spare": False, "num_choices": 1}
    move = _run(case)
    assert stage == "standby" or stage in move.seen, "the fault was injected"


@settings(max_examples=150, deadline=None)
@given(case=CASES)
def test_faults_at_any_moment(case: dict[str, Any]) -> None:
    _run(case)


@pytest.mark.soak
@settings(max_examples=5000, deadline=None)
@given(case=CASES)
def test_thousands_of_faults(case: dict[str, Any]) -> None:
    _run(case)
