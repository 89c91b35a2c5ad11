"""llama.cpp's operations on sequences, against a model of its rules and the bytes that a lease would move."""

from __future__ import annotations

from typing import Any

import pytest
from edit_world import World
from pool_driver import BLOCK_BYTES, BLOCK_TOKENS, prompt

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
