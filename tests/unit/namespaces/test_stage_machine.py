"""A pipeline's sequences over three real pools that others use too: whatever order answers and events come in, and
whichever stage is lost with what it was about to say, tables are complete and nothing is left behind."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from counted_machine import CountedMachine
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from pool_driver import BLOCK_BYTES, BLOCK_TOKENS, Driver, small_geometry

from remora.namespaces.commands import (
    Admit,
    Admitted,
    AnyCommand,
    Attach,
    Attached,
    Denied,
    Extend,
    Extended,
    ExtendItem,
    Granted,
    LeaseLost,
    OverQuota,
    Preempt,
    ProcessIdentity,
    Publish,
    Published,
    Release,
    Released,
    Seal,
    Tick,
    Wait,
)
from remora.namespaces.hashing import chain_hashes
from remora.namespaces.stage_book import StageBook
from remora.platform.base.ids import BlockHash, LeaseId, ModelId, NamespaceId, ReplicaId, SequenceId

NUM_STAGES = 3
#: Layers of the stages: their blocks, and so the number that fits, differ.
GEOMETRIES = [small_geometry(num_layers) for num_layers in (1, 2, 3)]
ROOT = BlockHash(b"root of the model")
#: Prompts that begin alike.
PROMPTS = [[token // 9 * kind if token > 9 else 1 for token in range(30)] for kind in (1, 2, 3)]
PICK = st.integers(0, 1_000_000)
STAGE = st.integers(0, NUM_STAGES - 1)


class Lease:
    """The pipeline's lease on one stage's pool, with what is under way in both directions."""

    def __init__(self, driver: Driver, stage: int, number: int) -> None:
        self.driver = driver
        self.lease_id = LeaseId(f"stage{stage}-{number}")
        self.call_no, self.event_no = 1, 0
        self.calls: deque[AnyCommand] = deque()
        self.answers: deque[Any] = deque()
        attach = Attach(
            lease_id=self.lease_id,
            call_no=1,
            replica_id=ReplicaId("r"),
            model_id=ModelId("m"),
            geometry=GEOMETRIES[stage],
            fingerprint=b"stage %d" % stage,
            process=ProcessIdentity(pid=stage + 1, start_time_ticks=number, boot_id="b"),
        )
        assert isinstance(driver.apply(attach), Attached)

    def apply_next(self) -> None:
        """The pool does the oldest call."""
        self.call_no += 1
        command = msgspec.structs.replace(self.calls.popleft(), lease_id=self.lease_id, call_no=self.call_no)
        self.answers.append(self.driver.apply(command))


class Run:
    """A sequence as the engine has it."""

    def __init__(self, tokens: list[int], num_blocks: int, max_blocks: int) -> None:
        self.tokens, self.num_blocks, self.max_blocks = tokens, num_blocks, max_blocks
        self.state = "asked"
        self.is_extending = False
        self.held = 0
        self.num_published = 0


class StageMachine(CountedMachine):
    @initialize(sizes=st.tuples(*[st.integers(1, 2)] * NUM_STAGES))
    def start(self, sizes: tuple[int, ...]) -> None:
        self.drivers = []
        for stage, num_extents in enumerate(sizes):
            driver = Driver(num_extents=num_extents, extent_bytes=12 * (stage + 1) * BLOCK_BYTES)
            driver.namespace("ns")
            driver.namespace("other", model="x")
            self.drivers.append(driver)
        self.leases: list[Lease] = []
        self.num_leases = 0
        for stage in range(NUM_STAGES):
            self.leases.append(self.new_lease(stage))
        self.strangers = [
            driver.lease("stranger", model="x", geometry=GEOMETRIES[stage]) for stage, driver in enumerate(self.drivers)
        ]
        self.strange: list[list[SequenceId]] = [[] for _ in range(NUM_STAGES)]
        self.book = StageBook([geometry.geometry_id for geometry in GEOMETRIES])
        self.runs: dict[SequenceId, Run] = {}
        self.open_commands = 0
        self.num_ids = 0

    def new_lease(self, stage: int) -> Lease:
        self.num_leases += 1
        return Lease(self.drivers[stage], stage, self.num_leases)

    # ---- the engine

    def say(self, command: AnyCommand) -> None:
        self.open_commands += 1
        self.book.command(command)
        self.carry()

    @rule(prompt=st.sampled_from(PROMPTS), length=st.integers(1, 30), reserve=st.integers(0, 2))
    def admit(self, prompt: list[int], length: int, reserve: int) -> None:
        self.num_ids += 1
        sequence_id = SequenceId(f"s{self.num_ids}")
        tokens = prompt[:length]
        num_blocks = -(-length // BLOCK_TOKENS) + reserve
        self.runs[sequence_id] = Run(tokens, num_blocks, num_blocks + 3)
        self.say(
            Admit(
                lease_id=LeaseId(""),
                sequence_id=sequence_id,
                namespace_id=NamespaceId("ns"),
                hashes=tuple(chain_hashes(ROOT, tokens, BLOCK_TOKENS)),
                num_tokens=length,
                num_blocks=num_blocks,
                max_blocks=num_blocks + 3,
            )
        )

    def running(self) -> list[SequenceId]:
        return [name for name, run in self.runs.items() if run.state == "runs"]

    @precondition(lambda self: self.running())
    @rule(pick=PICK, count=st.integers(1, 3))
    def extend(self, pick: int, count: int) -> None:
        names = [name for name in self.running() if not self.runs[name].is_extending]
        chosen = {names[(pick + i) % len(names)]: None for i in range(count)} if names else {}
        items = []
        for name in chosen:
            run = self.runs[name]
            if run.held < run.max_blocks:
                run.is_extending = True
                items.append(ExtendItem(sequence_id=name, num_blocks=1))
        if items:
            self.say(Extend(lease_id=LeaseId(""), items=tuple(items)))

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def publish(self, pick: int) -> None:
        name = self.running()[pick % len(self.running())]
        run = self.runs[name]
        hashes = chain_hashes(ROOT, run.tokens, BLOCK_TOKENS)
        seals = tuple(
            Seal(sequence_id=name, position=position, block_hash=hashes[position])
            for position in range(run.num_published, len(hashes))
        )
        if seals:
            run.num_published = len(hashes)
            self.say(Publish(lease_id=LeaseId(""), seals=seals))

    @precondition(lambda self: self.runs)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        name = list(self.runs)[pick % len(self.runs)]
        del self.runs[name]
        self.say(Release(lease_id=LeaseId(""), sequence_ids=(name, SequenceId("long gone"))))

    # ---- between the two

    def carry(self) -> None:
        """Calls go to their leases; answers and events come to the engine."""
        while self.book.calls or self.book.answers or self.book.events:
            if self.book.calls:
                call = self.book.calls.popleft()
                if isinstance(call.command, Admit) and "~" in call.command.sequence_id:
                    self.counts["asked again"] += 1
                self.leases[call.stage].calls.append(call.command)
            elif self.book.answers:
                self.open_commands -= 1
                self.hear(*self.book.answers.popleft())
            else:
                match self.book.events.popleft():
                    case Granted(admitted=admitted):
                        self.counts["granted"] += admitted.sequence_id in self.runs
                        self.admitted(admitted)
                    case Denied(over_quota=over_quota):
                        assert self.runs.pop(over_quota.sequence_id).state == "waits"
                    case Preempt(sequence_id=sequence_id):
                        if sequence_id in self.runs:
                            self.counts["preempted"] += 1
                            del self.runs[sequence_id]
                            self.say(Release(lease_id=LeaseId(""), sequence_ids=(sequence_id,)))
        self.book.check_integrity()

    def hear(self, command: AnyCommand, answer: Any) -> None:
        match answer:
            case Admitted():
                self.admitted(answer)
            case Wait(sequence_id=sequence_id):
                if sequence_id in self.runs:
                    assert self.runs[sequence_id].state == "asked"
                    self.runs[sequence_id].state = "waits"
            case OverQuota(sequence_id=sequence_id):
                assert self.runs.pop(sequence_id).state == "asked"
            case Extended(grants=grants, refused=refused):
                assert isinstance(command, Extend)
                named = [grant.sequence_id for grant in grants] + list(refused)
                assert sorted(named) == sorted(item.sequence_id for item in command.items)
                for grant in grants:
                    if (run := self.runs.get(grant.sequence_id)) is not None:
                        run.held += len(grant.blocks)
                        self.counts["extended"] += 1
                self.counts["refused"] += len(refused)
                for name in named:
                    if name in self.runs:
                        self.runs[name].is_extending = False
            case Published() | Released():
                pass
            case _:
                raise AssertionError(f"{command} was answered {answer}")

    def admitted(self, admitted: Admitted) -> None:
        run = self.runs.get(admitted.sequence_id)
        if run is None:
            return
        assert run.state in ("asked", "waits")
        self.counts["admitted"] += 1
        self.counts["hits"] += admitted.num_cached_blocks > 0
        assert len(admitted.blocks) == run.num_blocks
        assert list(admitted.blocks) == list(self.book.blocks(admitted.sequence_id, 0))
        run.state, run.held, run.num_published = "runs", run.num_blocks, admitted.num_cached_blocks

    # ---- pools

    @precondition(lambda self: any(lease.calls for lease in self.leases))
    @rule(stage=STAGE, count=st.integers(1, 4))
    def a_pool_works(self, stage: int, count: int) -> None:
        for _ in range(min(count, len(self.leases[stage].calls))):
            self.leases[stage].apply_next()

    @rule(stage=STAGE, count=st.integers(1, 4))
    def answers_arrive(self, stage: int, count: int) -> None:
        lease = self.leases[stage]
        for _ in range(min(count, len(lease.answers))):
            self.book.answer(stage, lease.answers.popleft())
            self.carry()

    @rule(stage=STAGE)
    def events_arrive(self, stage: int) -> None:
        lease = self.leases[stage]
        if not self.book.is_up(stage):
            return
        for event in self.drivers[stage].state.events_after(lease.lease_id, lease.event_no):
            lease.event_no = event.event_no
            self.book.event(stage, event)
            self.carry()

    @rule(rounds=st.integers(1, 6))
    def everybody_works(self, rounds: int) -> None:
        for _ in range(rounds):
            for stage in range(NUM_STAGES):
                self.a_pool_works(stage, 1000)
                self.answers_arrive(stage, 1000)
                self.events_arrive(stage)

    @rule(prompt=st.sampled_from(PROMPTS), length=st.integers(10, 30))
    def admit_at_once(self, prompt: list[int], length: int) -> None:
        self.admit(prompt, length, 0)
        self.everybody_works(6)

    @rule(pick=PICK)
    def publish_and_release(self, pick: int) -> None:
        if running := self.running():
            name = running[pick % len(running)]
            self.publish(running.index(name))
            self.release(list(self.runs).index(name))
            self.everybody_works(2)

    @rule(stage=STAGE, num_blocks=st.integers(1, 8))
    def somebody_else_takes_memory(self, stage: int, num_blocks: int) -> None:
        self.num_ids += 1
        name = f"x{self.num_ids}"
        self.strangers[stage].admit(name, "other", [self.num_ids] * (num_blocks * BLOCK_TOKENS))
        self.strange[stage].append(SequenceId(name))

    @rule(stage=STAGE)
    def somebody_else_gives_memory_back(self, stage: int) -> None:
        if self.strange[stage]:
            self.strangers[stage].call(Release, sequence_ids=(self.strange[stage].pop(0),))

    @rule(stage=st.integers(1, NUM_STAGES - 1), delay=st.booleans())
    def a_stage_dies(self, stage: int, delay: bool) -> None:
        """With calls on their way, done or not, and answers that never come."""
        if not self.book.is_up(stage):
            return
        lease = self.leases[stage]
        if delay and lease.calls:
            lease.apply_next()
        lease.calls.clear()
        lease.answers.clear()
        self.drivers[stage].apply(LeaseLost(lease_id=lease.lease_id))
        self.counts["lost"] += bool(self.runs)
        self.book.lose(stage, "its worker has died")
        self.carry()
        assert not any(run.state == "runs" for run in self.runs.values()), "nobody runs without a stage"

    @rule(stage=st.integers(1, NUM_STAGES - 1))
    def a_stage_comes_back(self, stage: int) -> None:
        if not self.book.is_up(stage):
            self.leases[stage] = self.new_lease(stage)
            self.book.restore(stage)
            self.carry()

    # ---- what must hold

    @invariant()
    def tables_are_complete(self) -> None:
        if not hasattr(self, "book"):
            return
        for name, run in self.runs.items():
            if run.state == "runs":
                for stage in range(NUM_STAGES):
                    assert len(self.book.blocks(name, stage)) >= run.held

    def deliver_everything(self) -> None:
        for _ in range(1000):
            before = [(lease.call_no, len(lease.calls), lease.event_no) for lease in self.leases]
            self.everybody_works(1)
            if before == [(lease.call_no, len(lease.calls), lease.event_no) for lease in self.leases]:
                return
        raise AssertionError("the stages never come to rest")

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for stage in range(1, NUM_STAGES):
            self.a_stage_comes_back(stage)
        for stage, names in enumerate(self.strange):
            self.strangers[stage].call(Release, sequence_ids=tuple(names))
        self.deliver_everything()
        # Whoever waits is served as others end: no ring of waiting.
        while self.runs:
            running = self.running()
            assert running, f"nobody runs, and these wait: {list(self.runs)}"
            for name in running:
                del self.runs[name]
                self.say(Release(lease_id=LeaseId(""), sequence_ids=(name,)))
            self.deliver_everything()
        assert self.open_commands == 0, "every command was answered once"
        assert not self.book.runs
        for driver in self.drivers:
            driver.apply(Tick(lease_id=LeaseId("")))
            assert driver.state.describe().num_referenced_blocks == 0, "no block leaks in any pool"


#: What must have happened, and how often at least.
PARTS = {
    "admitted": 250,
    "hits": 50,
    "asked again": 50,
    "granted": 100,
    "extended": 3,
    "refused": 3,
    "preempted": 10,
    "lost": 40,
}


def test_stages_agree_and_leave_nothing_behind_whatever_happens_in_whatever_order() -> None:
    StageMachine.run(max_examples=150, stateful_step_count=50)
    for part, least in PARTS.items():
        assert StageMachine.counts[part] >= least, (part, StageMachine.counts)
