"""Contexts that roll and are edited: with a fake model that shows every misplaced token, and with a real decoder."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import BLOCK_TOKENS, FakeModel, Harness, Output, expected_greedy, rolled
from tiny_llama import LLAMA_GEOMETRY, tiny_llama

from remora.deployments.engine import live_request
from remora.kernels.mover import KVMover
from remora.namespaces.commands import Refused
from remora.namespaces.edits import ContextPlan, Edits, Removal, after_removal, chain_edits, recomputed
from remora.namespaces.hashing import chain_hashes
from remora.namespaces.sequence_commands import NoRoom, SequenceRemove
from remora.platform.base.errors import KernelError


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def roll(limit: int, keep: int, edits: Edits = ()) -> ContextPlan:
    return ContextPlan(limit_tokens=limit, keep_tokens=keep, edits=edits)


def left_of(prompt: list[int], output: Output) -> list[int]:
    """The log of prompt and output without what has left it."""
    log = prompt + output.token_ids
    if output.context is not None:
        for start, end in output.context.removed:
            del log[start:end]
    return log


@pytest.mark.parametrize(
    ("limit", "keep", "budget"), [(24, 5, 512), (24, 4, 7), (30, 0, 16), (17, 16, 5), (40, 11, 40)]
)
def test_a_context_rolls_where_it_is_full_however_its_steps_are_cut(limit: int, keep: int, budget: int) -> None:
    harness = Harness(max_step_tokens=budget)
    prompt = tokens_of(70)
    expected, context = rolled(prompt, 60, limit=limit, keep=min(keep, limit // 2))
    output = harness.run(prompt, max_tokens=60, context=roll(limit, keep))
    assert output.token_ids == expected
    assert left_of(prompt, output)[:-1] == context
    assert output.finish_reason == "length"
    harness.close()


def test_what_moves_tokens_is_loaded_ahead_for_requests_whose_context_may_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica whose weights were packed already has no torch; its engine must not wait for it at the first roll."""
    asked: list[str] = []
    monkeypatch.setattr(live_request, "prepare_moves", lambda: asked.append("asked"))
    harness = Harness()
    harness.run(tokens_of(20), context=ContextPlan(limit_tokens=64))
    assert asked == []
    harness.run(tokens_of(20), context=roll(64, 5))
    assert asked == ["asked"]
    harness.close()


def test_without_rolling_a_full_context_ends_the_output() -> None:
    harness = Harness()
    output = harness.run(tokens_of(20), max_tokens=60, context=ContextPlan(limit_tokens=32))
    assert (len(output.token_ids), output.finish_reason, output.context) == (12, "length", None)
    output = harness.run(tokens_of(32), context=ContextPlan(limit_tokens=32))
    assert output.error == "ContextLengthExceeded"
    harness.close()


def test_the_next_turn_of_a_rolled_session_finds_its_edited_blocks() -> None:
    harness = Harness()
    prompt = tokens_of(40)
    first = harness.run(prompt, max_tokens=30, context=roll(32, 8))
    assert first.context is not None
    log = left_of(prompt, first)
    second = harness.run([*log, *tokens_of(3, 1)], max_tokens=4, context=roll(32, 8, first.context.edits))
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= (len(log) - 1) // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
    assert second.token_ids == rolled(prompt + first.token_ids + tokens_of(3, 1), 4, limit=32, keep=8)[0]
    harness.close()


def test_a_removal_between_turns_happens_on_the_kv_of_the_turns_before() -> None:
    """Two ranges leave, one after the other, before the new turn is computed."""
    harness = Harness()
    before = tokens_of(41)
    harness.run(before, max_tokens=1)
    after = [*before, *tokens_of(6, 1)]
    plan = ContextPlan(removals=(Removal(at=41, start=6, end=13), Removal(at=34, start=20, end=21)))
    output = harness.run(after, max_tokens=9, context=plan)
    assert output.num_cached_tokens == 40
    left = [*after[:6], *after[13:27], *after[28:]]
    assert output.token_ids == expected_greedy(left, 9)
    assert output.context is not None
    assert output.context.removed == ((6, 13), (20, 21))
    assert [(edit.position, edit.kind) for edit in output.context.edits] == [(6, "removed"), (20, "removed")]
    harness.close()


def test_a_stranger_with_the_tokens_that_are_left_gets_a_miss() -> None:
    harness = Harness()
    prompt = tokens_of(40)
    output = harness.run(prompt, max_tokens=30, context=roll(32, 8))
    log = left_of(prompt, output)
    assert harness.run(log, max_tokens=2).num_cached_tokens == 8, "what is before the edit is as it was"
    harness.close()


def test_kept_kv_that_is_lost_is_computed_anew_and_named_so() -> None:
    harness = Harness(num_blocks=16)
    prompt = tokens_of(40)
    first = harness.run(prompt, max_tokens=8, context=roll(32, 8))
    assert first.context is not None
    for seed in range(4):
        harness.run(tokens_of(60, 50 + seed), max_tokens=1)
    log = [*left_of(prompt, first), 7]
    second = harness.run(log, max_tokens=3, context=roll(32, 8, first.context.edits))
    assert second.token_ids == expected_greedy(log, 3)
    assert second.context is not None
    assert [edit.kind for edit in second.context.edits] == ["recomputed"]
    again = harness.run([*left_of(log, second), 9], max_tokens=3, context=roll(32, 8, second.context.edits))
    assert again.num_cached_tokens >= 20
    harness.close()


@pytest.mark.parametrize("answer", ["no room", "refused", "cannot move"])
def test_a_roll_without_room_for_it_goes_on_with_what_is_left(answer: str) -> None:
    model = FakeModel()
    if answer == "cannot move":
        model.rope_inv_freq = None
    harness = Harness(model=model)
    if answer != "cannot move":
        harness.pool.deny = lambda command: (
            (NoRoom(sequence_id=command.sequence_id, num_missing_blocks=1) if answer == "no room"
             else Refused(error="Conflict", message="told to go"))
            if isinstance(command, SequenceRemove) else None
        )  # fmt: skip
    prompt = tokens_of(40)
    output = harness.run(prompt, max_tokens=30, context=roll(32, 8))
    assert output.token_ids == rolled(prompt, 30, limit=32, keep=8)[0]
    assert output.context is not None
    assert {edit.kind for edit in output.context.edits} == {"recomputed"}
    harness.close()


def test_bytes_that_cannot_be_moved_end_their_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_mover: KVMover, _moves: object) -> None:
        raise KernelError("the arena is gone")

    monkeypatch.setattr(KVMover, "move", fail)
    harness = Harness()
    ids = [harness.submit(tokens_of(20), max_tokens=20, context=plan) for plan in (None, roll(24, 4))]
    harness.finish()
    assert harness.outputs[ids[0], 0].token_ids == expected_greedy(tokens_of(20), 20)
    assert harness.outputs[ids[1], 0].error == "KernelError"
    harness.settle()
    assert harness.num_referenced_blocks == 0
    harness.close()


def test_rolling_sequences_share_a_pool_that_is_too_small_for_them() -> None:
    harness = Harness(num_blocks=22)
    prompts = [tokens_of(20 + 7 * seed, seed) for seed in range(4)]
    ids = [harness.submit(prompt, max_tokens=40, context=roll(32, 6)) for prompt in prompts]
    harness.finish()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert harness.outputs[request_id, 0].token_ids == rolled(prompt, 40, limit=32, keep=6)[0]
    harness.close()


def test_a_request_that_moves_to_another_engine_rolls_at_the_same_places() -> None:
    prompt = tokens_of(40)
    whole = Harness().run(prompt, max_tokens=30, context=roll(32, 8))
    for num_given in (1, 13, 29):
        given = (tuple(whole.token_ids[:num_given]),)
        resumed = Harness().run(prompt, max_tokens=30, given=given, context=roll(32, 8))
        assert resumed.token_ids == whole.token_ids
        assert resumed.context == whole.context


def test_a_seeded_text_draws_no_number_twice_when_its_context_rolls() -> None:
    prompt = tokens_of(20)
    options = {"max_tokens": 60, "temperature": 1.5, "seed": 3}
    output = Harness().run(prompt, context=roll(24, 4), **options)
    assert len(set(output.token_ids)) > 20
    assert Harness().run(prompt, context=roll(24, 4), **options).token_ids == output.token_ids


def test_sessions_have_one_choice() -> None:
    harness = Harness()
    request_id = harness.submit(tokens_of(5), n=2, context=roll(24, 4))
    harness.finish()
    assert harness.outputs[request_id, 0].error == "InvalidRequest"


def test_edited_blocks_of_a_real_decoder_are_rotated_and_stay_apart_from_the_plain_ones() -> None:
    """Sequences that never rolled say the same before, beside and after one that does."""
    model = tiny_llama("reference")
    harness = Harness(model=model, geometry=LLAMA_GEOMETRY, num_blocks=64)
    plain = tokens_of(70, 5)
    alone = harness.run(plain, max_tokens=12).token_ids
    ids = [harness.submit(plain, max_tokens=12), harness.submit(plain, max_tokens=80, context=roll(96, 16))]
    harness.finish()
    assert harness.outputs[ids[0], 0].token_ids == alone
    rolling = harness.outputs[ids[1], 0]
    assert rolling.token_ids[:12] == alone
    assert rolling.context is not None
    assert harness.run(plain, max_tokens=12).token_ids == alone
    log = left_of(plain, rolling)
    cold = Harness(model=model, geometry=LLAMA_GEOMETRY, num_blocks=64).run(log, max_tokens=4)
    warm = harness.run(log, max_tokens=4)
    assert (warm.token_ids, warm.num_cached_tokens) == (cold.token_ids, 16)
    harness.close()


def test_an_edit_is_named_by_everything_its_kv_depends_on() -> None:
    tokens, removal = tokens_of(20), Removal(at=20, start=5, end=9)
    edits = after_removal((), tokens, removal)
    others = [
        after_removal((), [*tokens[:6], tokens[6] ^ 1, *tokens[7:]], removal),
        after_removal((), tokens, Removal(at=20, start=5, end=10)),
        after_removal((), [*tokens, 1], Removal(at=21, start=5, end=9)),
        after_removal(recomputed((), 3), tokens, removal),
        recomputed((), 5),
    ]
    left = tokens[:5] + tokens[9:]
    root = Harness().root("ns")
    chains = [chain_hashes(root, left, BLOCK_TOKENS, chain_edits(each)) for each in (edits, *others)]
    assert len({chain[1] for chain in chains}) == len(chains)
