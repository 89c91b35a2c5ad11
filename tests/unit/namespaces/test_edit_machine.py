"""Operations on sequences in whatever order, repeated, overtaken and late, while the pool dies and comes back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from counted_machine import CountedMachine
from edit_world import World
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from pool_driver import BLOCK_TOKENS, prompt

from remora.namespaces.commands import Refused
from remora.namespaces.sequence_commands import (
    Edited,
    NoRoom,
    SequenceCopy,
    SequenceKeep,
    SequenceRemove,
    SequenceShift,
)


class EditMachine(CountedMachine):
    """Random operations on sequences that share prefixes, in a pool that runs out of memory now and then."""

    PICK = st.integers(0, 1000)
    POSITION = st.integers(-1, 30)

    @initialize()
    def start(self) -> None:
        self.world = World(num_blocks=40)
        self.world.driver.keep_journal()
        self.next_id = 0
        self.released: list[str] = []

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
        self.released.append(name)

    @rule(number=PICK)
    @precondition(lambda self: self.world.told)
    def keep(self, number: int) -> None:
        name = self.pick(number)
        self.world.replica.call(SequenceKeep, sequence_id=name)
        self.world.told = {name: self.world.told[name]}

    @rule()
    def restart(self) -> None:
        self.world.driver.restart()

    @rule(torn=st.booleans())
    def the_pool_dies_at_the_next_command(self, torn: bool) -> None:
        self.world.driver.dies_next = "torn" if torn else "whole"

    @rule(back=st.integers(1, 8))
    @precondition(lambda self: self.world.answered)
    def an_operation_is_said_again(self, back: int) -> None:
        command, answer = self.world.answered[-min(back, len(self.world.answered))]
        before = self.world.driver.state.snapshot()
        assert self.world.driver.apply(command) == answer
        assert self.world.driver.state.snapshot() == before

    @rule(number=PICK, ahead=st.integers(2, 5))
    @precondition(lambda self: self.world.told)
    def an_operation_overtakes_another(self, number: int, ahead: int) -> None:
        replica = self.world.replica
        before = self.world.driver.state.snapshot()
        answer = self.world.driver.apply(
            SequenceRemove(
                lease_id=replica.lease_id,
                call_no=replica.call_no + ahead,
                sequence_id=self.pick(number),
                start=0,
                end=1,
            )
        )
        assert isinstance(answer, Refused)
        assert answer.error == "CallOrder"
        assert self.world.driver.state.snapshot() == before

    @rule(number=PICK, kind=st.sampled_from([SequenceRemove, SequenceCopy]))
    @precondition(lambda self: self.released)
    def an_operation_comes_too_late(self, number: int, kind: Any) -> None:
        name = self.released[number % len(self.released)]
        before = self.world.driver.state.describe()
        named = {"sequence_id": name} if kind is SequenceRemove else {"source_id": name, "target_id": self.new_name()}
        answer = self.world.replica.call(kind, start=0, end=-1, **named)
        assert isinstance(answer, Refused)
        after = self.world.driver.state.describe()
        assert (after.used_bytes, after.num_referenced_blocks) == (before.used_bytes, before.num_referenced_blocks)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


def test_edits_do_what_llama_cpp_does_to_one_sequence_and_nothing_to_others() -> None:
    EditMachine.run(max_examples=90, stateful_step_count=30)
