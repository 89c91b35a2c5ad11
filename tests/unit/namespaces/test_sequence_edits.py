"""llama.cpp's operations on sequences, against a model of its rules and the bytes that a lease would move."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_driver import BLOCK_BYTES, BLOCK_TOKENS, Driver, Replica, prompt

from remora.namespaces.commands import Refused
from remora.namespaces.effects import ZeroBlocks
from remora.namespaces.sequence_commands import (
    Clear,
    Cleared,
    Edited,
    NoRoom,
    Positions,
    SequenceCopy,
    SequenceKeep,
    SequencePositions,
    SequenceRemove,
    SequenceShift,
    Settle,
    Settled,
)


@dataclass
class Told:
    """What a sequence must hold: (position, token) in order, and where its writer believes it to lie."""

    cells: list[tuple[int, int]]
    table: list[int]


@dataclass
class World:
    """One replica that computes prompts, moves bytes as it is told, and remembers what must be where."""

    num_blocks: int = 24
    driver: Driver = field(init=False)
    replica: Replica = field(init=False)
    #: (block, slot) → (token, the position that K was rotated to).
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    told: dict[str, Told] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.driver = Driver(num_extents=1, extent_bytes=self.num_blocks * BLOCK_BYTES)
        self.driver.namespace("ns")
        self.replica = self.driver.lease()

    def begin(self, name: str, tokens: list[int], *, publish: bool = True) -> Told:
        """Admits and computes a prompt; what is cached is there already."""
        admitted = self.replica.admit(name, "ns", tokens)
        told = self.told[name] = Told([], list(admitted.blocks))
        told.cells = list(enumerate(tokens))
        for slot in range(admitted.num_cached_blocks * BLOCK_TOKENS, len(tokens)):
            self.slots[self.place(told, slot)] = (tokens[slot], slot)
        if publish:
            self.replica.publish(name, "ns", tokens, start=admitted.num_cached_blocks)
        return told

    @staticmethod
    def place(told: Told, slot: int) -> tuple[int, int]:
        return told.table[slot // BLOCK_TOKENS], slot % BLOCK_TOKENS

    def edit(self, kind: Any, **fields: Any) -> Any:
        """An operation on one sequence, its moves, and the settlement."""
        return self.took(fields["sequence_id"], fields["sequence_id"], self.replica.call(kind, **fields))

    def copy(self, source: str, target: str, **fields: Any) -> Any:
        return self.took(source, target, self.replica.call(SequenceCopy, source_id=source, target_id=target, **fields))

    def took(self, source: str, target: str, answer: Any) -> Any:
        if isinstance(answer, Edited):
            table = self.told[source].table[: answer.num_kept_blocks] + list(answer.blocks)
            self.told[target] = Told(list(self.told[target].cells) if target in self.told else [], table)
            self.move(answer)
            self.move(answer)
            assert self.replica.call(Settle, sequence_ids=(target,)) == Settled()
        return answer

    def move(self, answer: Edited) -> None:
        for move in answer.moves:
            for i in range(move.num_tokens):
                token, position = self.slots[move.source_block, move.source_slot + i]
                self.slots[move.target_block, move.target_slot + i] = (token, position + move.delta)

    def check(self) -> None:
        """Every sequence reads its own tokens, rotated to its own positions."""
        for name, told in self.told.items():
            read = [self.slots[self.place(told, slot)] for slot in range(len(told.cells))]
            assert read == [(token, position) for position, token in told.cells], name
            found = self.replica.call(SequencePositions, sequence_id=name, num_tokens=len(told.cells))
            expected = [position for position, _ in told.cells] or [-1]
            assert found == Positions(pos_min=expected[0], pos_max=expected[-1])


@pytest.fixture
def world() -> World:
    return World()


def test_a_fork_shares_sealed_blocks_and_copies_the_partial_one(world: World) -> None:
    tokens = prompt(3.5)
    source = world.begin("a", tokens)
    before = world.driver.report("ns").used_bytes
    answer = world.copy("a", "b", num_tokens=len(tokens))
    assert answer.num_kept_blocks == 3
    assert [(m.source_block, m.num_tokens, m.delta) for m in answer.moves] == [(source.table[3], 2, 0)]
    assert answer.first_edited_token is None
    assert world.driver.report("ns").used_bytes == before + BLOCK_BYTES
    world.told["b"].cells = list(source.cells)
    world.check()


@pytest.mark.parametrize("num_tokens", [100, 10_003])
def test_a_fork_of_any_length_copies_one_block_at_most(num_tokens: int) -> None:
    world = World(num_blocks=num_tokens // BLOCK_TOKENS + 4)
    world.begin("a", list(range(num_tokens)))
    answer = world.copy("a", "b", num_tokens=num_tokens)
    assert answer.num_kept_blocks == num_tokens // BLOCK_TOKENS
    assert len(answer.moves) == (1 if num_tokens % BLOCK_TOKENS else 0)


def test_the_source_of_a_copy_may_go_before_the_copy_is_made(world: World) -> None:
    tokens = prompt(2.5)
    world.begin("a", tokens)
    answer = world.replica.call(SequenceCopy, source_id="a", target_id="b", num_tokens=len(tokens))
    world.replica.release("a")
    taken = {block for name in "cdefgh" for block in world.replica.admit(name, "ns", prompt(2, ord(name))).blocks}
    assert answer.moves[0].source_block not in taken
    world.driver.restart()
    assert isinstance(world.replica.call(Settle, sequence_ids=("b",)), Settled)
    more = world.replica.admit("z", "ns", prompt(1, 99)).blocks
    assert more == (answer.moves[0].source_block,)


def test_a_copy_under_way_does_not_break_the_chain_of_what_its_source_publishes(world: World) -> None:
    tokens = prompt(3)
    world.begin("twin", tokens)
    world.begin("a", tokens + prompt(1, 7), publish=False)
    world.replica.release("twin")
    unsealed = world.begin("b", prompt(2, 5), publish=False)
    answer = world.replica.call(SequenceCopy, source_id="b", target_id="c", num_tokens=8)
    assert len(answer.moves) == len(unsealed.table)
    assert world.replica.publish("b", "ns", prompt(2, 5)).num_sealed == 0
    world.replica.release("b")
    world.replica.release("c")
    world.driver.tick()


def test_removing_the_end_keeps_what_is_before_it_findable(world: World) -> None:
    tokens = prompt(4)
    world.begin("a", tokens)
    answer = world.edit(SequenceRemove, sequence_id="a", start=10)
    assert (answer.num_kept_blocks, answer.first_edited_token, answer.num_tokens) == (2, None, 10)
    assert sum(move.num_tokens for move in answer.moves) == 2, "the sealed block's slots are copied, not written"
    world.told["a"].cells = world.told["a"].cells[:10]
    world.check()


def test_removing_the_end_of_a_private_block_copies_nothing(world: World) -> None:
    world.begin("a", prompt(2.75))
    answer = world.edit(SequenceRemove, sequence_id="a", start=9, num_tokens=11)
    assert (answer.num_kept_blocks, answer.blocks, answer.moves) == (3, (), ())


def test_removing_from_the_middle_leaves_a_gap_or_closes_it(world: World) -> None:
    tokens = prompt(4)
    for name, close_gap in (("a", False), ("b", True)):
        told = world.begin(name, tokens)
        answer = world.edit(SequenceRemove, sequence_id=name, start=5, end=9, close_gap=close_gap)
        assert answer.first_edited_token == 5
        gap = 0 if close_gap else 4
        world.told[name].cells = told.cells[:5] + [(p - 4 + gap, t) for p, t in told.cells[9:]]
    world.check()


def test_shifting_one_sequence_moves_no_other(world: World) -> None:
    """llama.cpp moves every sequence that shares the cells."""
    tokens = prompt(4)
    world.begin("a", tokens)
    world.begin("b", tokens)
    world.edit(SequenceShift, sequence_id="a", start=6, delta=3)
    world.told["a"].cells = [(p + 3 if p >= 6 else p, t) for p, t in world.told["a"].cells]
    world.check()


def test_positions_that_become_negative_are_gone(world: World) -> None:
    world.begin("a", prompt(3))
    world.edit(SequenceShift, sequence_id="a", delta=-5)
    world.told["a"].cells = [(p - 5, t) for p, t in world.told["a"].cells if p >= 5]
    world.check()


@pytest.mark.parametrize(
    ("kind", "fields", "error"),
    [
        (SequenceShift, {"sequence_id": "a", "start": 6, "delta": -3}, "InvalidRequest"),
        (SequenceShift, {"sequence_id": "a", "end": 6, "delta": 3}, "InvalidRequest"),
        (SequenceRemove, {"sequence_id": "a", "num_tokens": 3}, "InvalidRequest"),
        (SequenceRemove, {"sequence_id": "a", "num_tokens": 99}, "InvalidRequest"),
        (SequenceRemove, {"sequence_id": "nobody"}, "UnknownSequence"),
        (SequenceCopy, {"source_id": "a", "target_id": "a"}, "Conflict"),
        (SequenceCopy, {"source_id": "nobody", "target_id": "b"}, "UnknownSequence"),
        (SequenceKeep, {"sequence_id": "nobody"}, "UnknownSequence"),
        (SequencePositions, {"sequence_id": "nobody"}, "UnknownSequence"),
        (Settle, {"sequence_ids": ("nobody",)}, "UnknownSequence"),
    ],
)
def test_what_cannot_be_done_changes_nothing(world: World, kind: Any, fields: Any, error: str) -> None:
    world.begin("a", prompt(4))
    before = world.driver.state.describe()
    answer = world.replica.call(kind, **fields)
    assert isinstance(answer, Refused)
    assert answer.error == error
    after = world.driver.state.describe()
    assert (after.used_bytes, after.cached_bytes) == (before.used_bytes, before.cached_bytes)
    world.check()


def test_an_edit_without_room_changes_nothing_and_preempts_nobody() -> None:
    world = World(num_blocks=9)
    world.begin("a", prompt(6))
    world.begin("b", prompt(2, 1))
    answer = world.replica.call(SequenceRemove, sequence_id="a", start=1, end=2, close_gap=True)
    assert answer == NoRoom(sequence_id="a", num_missing_blocks=5)
    assert isinstance(world.replica.call(SequenceCopy, source_id="a", target_id="c", start=1), NoRoom)
    assert world.replica.events() == ()
    world.check()
    assert not world.driver.state._parts.leases.leases[world.replica.lease_id].knows("c")


def test_a_second_edit_waits_until_the_first_is_settled(world: World) -> None:
    world.begin("a", prompt(3))
    first = world.replica.call(SequenceRemove, sequence_id="a", start=2, end=3)
    assert isinstance(first, Edited)
    second = world.replica.call(SequenceRemove, sequence_id="a", start=0, end=1)
    assert isinstance(second, Refused)
    assert second.error == "Conflict"
    world.replica.release("a")
    assert world.driver.state.describe().num_referenced_blocks == 0


def test_an_edited_sequence_publishes_behind_its_edit_only(world: World) -> None:
    tokens = prompt(4)
    world.begin("a", tokens)
    world.edit(SequenceRemove, sequence_id="a", start=5, end=6, close_gap=True)
    assert world.replica.publish("a", "ns", tokens[:5] + tokens[6:15] + [1] * 3, start=1).num_sealed == 3
    world.replica.release("a")
    assert world.replica.admit("same", "ns", tokens).num_cached_blocks == 3


def test_keeping_one_sequence_ends_the_others_of_the_lease(world: World) -> None:
    for number, name in enumerate("abc"):
        world.begin(name, prompt(2, number))
    other = world.driver.lease("lease-2")
    other.run("mine", "ns", prompt(1, 9))
    assert world.replica.call(SequenceKeep, sequence_id="b") == Cleared(num_sequences=2)
    assert world.driver.report("ns").num_running == 2
    assert world.replica.call(SequencePositions, sequence_id="b") == Positions(pos_min=0, pos_max=7)


def test_clearing_forgets_what_is_cached_and_zeroes_it(world: World) -> None:
    world.begin("a", prompt(2))
    world.replica.cache("old", "ns", prompt(3, 1))
    other = world.driver.lease("lease-2")
    other.run("held", "ns", prompt(1, 2))
    assert world.replica.call(Clear) == Cleared(num_sequences=1)
    assert world.driver.report("ns").cached_bytes == 5 * BLOCK_BYTES
    world.driver.effects.clear()
    assert world.replica.call(Clear, data=True) == Cleared(num_sequences=0, num_blocks=5)
    (zero,) = world.driver.effects
    assert isinstance(zero, ZeroBlocks)
    assert len(zero.blocks) == 5
    report = world.driver.report("ns")
    assert (report.cached_bytes, report.used_bytes) == (0, BLOCK_BYTES)
    assert report.evicted_blocks == {"cleared": 5}


class EditMachine(RuleBasedStateMachine):
    """Random operations on sequences that share prefixes, in a pool that runs out of memory now and then."""

    PICK = st.integers(0, 1000)
    POSITION = st.integers(-1, 30)

    @initialize()
    def start(self) -> None:
        self.world = World(num_blocks=40)
        self.next_id = 0

    def pick(self, number: int) -> str:
        names = sorted(self.world.told)
        return names[number % len(names)]

    def new_name(self) -> str:
        self.next_id += 1
        return f"s{self.next_id}"

    @rule(family=st.integers(0, 2), length=st.integers(1, 24), publish=st.booleans())
    @precondition(lambda self: len(self.world.told) < 5)
    def begin(self, family: int, length: int, publish: bool) -> None:
        free = self.world.driver.state.describe()
        if free.num_referenced_blocks + -(-length // BLOCK_TOKENS) <= 40:
            self.world.begin(self.new_name(), prompt(6, family)[:length], publish=publish)

    @rule(number=PICK, start=POSITION, end=POSITION)
    @precondition(lambda self: self.world.told)
    def copy(self, number: int, start: int, end: int) -> None:
        source, target = self.pick(number), self.new_name()
        cells = self.world.told[source].cells
        answer = self.world.copy(source, target, start=start, end=end, num_tokens=len(cells))
        if isinstance(answer, Edited):
            last = end if end >= 0 else 10**9
            self.world.told[target].cells = [(p, t) for p, t in cells if max(0, start) <= p < last]
        else:
            assert isinstance(answer, NoRoom)

    @rule(number=PICK, start=POSITION, end=POSITION, close_gap=st.booleans())
    @precondition(lambda self: self.world.told)
    def remove(self, number: int, start: int, end: int, close_gap: bool) -> None:
        name = self.pick(number)
        cells = self.world.told[name].cells
        answer = self.world.edit(
            SequenceRemove, sequence_id=name, start=start, end=end, close_gap=close_gap, num_tokens=len(cells)
        )
        if isinstance(answer, Edited):
            first, last = max(0, start), end if end >= 0 else 10**9
            length = max(0, min(last, cells[-1][0] + 1) - first) if cells and close_gap else 0
            kept = [(p - (length if p >= last else 0), t) for p, t in cells if not first <= p < last]
            self.world.told[name].cells = kept
        else:
            assert isinstance(answer, NoRoom)

    @rule(number=PICK, start=POSITION, end=POSITION, delta=st.integers(-8, 8))
    @precondition(lambda self: self.world.told)
    def shift(self, number: int, start: int, end: int, delta: int) -> None:
        name = self.pick(number)
        cells = self.world.told[name].cells
        first, last = max(0, start), end if end >= 0 else 10**9
        moved = [(p + delta if first <= p < last else p, t) for p, t in cells]
        moved = [(p, t) for p, t in moved if p >= 0]
        answer = self.world.edit(
            SequenceShift, sequence_id=name, start=start, end=end, delta=delta, num_tokens=len(cells)
        )
        in_order = all(a[0] < b[0] for a, b in pairwise(moved))
        assert isinstance(answer, Edited | NoRoom) == in_order
        if isinstance(answer, Edited):
            self.world.told[name].cells = moved

    @rule(number=PICK)
    @precondition(lambda self: self.world.told)
    def release(self, number: int) -> None:
        name = self.pick(number)
        self.world.replica.release(name)
        del self.world.told[name]

    @rule(number=PICK)
    @precondition(lambda self: self.world.told)
    def keep(self, number: int) -> None:
        name = self.pick(number)
        self.world.replica.call(SequenceKeep, sequence_id=name)
        self.world.told = {name: self.world.told[name]}

    @rule()
    def restart(self) -> None:
        self.world.driver.restart()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


EditMachine.TestCase.settings = settings(max_examples=70, stateful_step_count=30, deadline=None)
test_edits_do_what_llama_cpp_does_to_one_sequence_and_nothing_to_others = EditMachine.TestCase
