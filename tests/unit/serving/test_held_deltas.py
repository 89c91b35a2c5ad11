"""HeldDeltas: whatever is joined or held back, each choice's tokens and texts come out whole, in order and in time."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.engine.messages import EventFrame, FinishReason, GenerationRequest, SamplingParams, TokenDelta
from remora.deployments.held_deltas import MAX_CHUNKS_PER_S, MAX_HOLD_S, HeldDeltas
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, RequestId, RouterId

FRAMES = tuple(EventFrame(b'data: {"index": %d, "text": ' % index, b"}\n\n") for index in range(2))


def request(name: str, *, framed: bool = False, wants_token_ids: bool = True) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name), router_id=RouterId("r"), model_id=ModelId("m"), namespace_id=NamespaceId("n"),
        prompt_token_ids=(1,), block_hashes=(), sampling=SamplingParams(), num_choices=2,
        frames=FRAMES if framed else (), wants_token_ids=wants_token_ids,
    )  # fmt: skip


def delta(name: str, choice: int, index: int, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(
        request_id=RequestId(name), choice_index=choice, epoch=Epoch(0), first_token_index=index, token_ids=(index,),
        text=f"<{index}>\n", finish_reason=reason, num_cached_tokens=3 if index == 0 else None,
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.floats(0, 0.02)), max_size=80),
    st.booleans(),
    st.booleans(),
)
def test_every_token_and_text_comes_out_once_and_in_order(
    steps: list[tuple[str, int, float]], framed: bool, wants_token_ids: bool
) -> None:
    held, now_s = HeldDeltas(0.0), 0.0
    for name in "abcd":
        held.take(request(name, framed=framed, wants_token_ids=wants_token_ids))
    given_tokens: dict[tuple[str, int], int] = {}
    got: list[TokenDelta] = []
    for name, choice, pause_s in steps:
        index = given_tokens.get((name, choice), 0)
        given_tokens[name, choice] = index + 1
        held.add(delta(name, choice, index))
        now_s += pause_s
        held.release(now_s)
        got += held.take_ready()
    held.release(now_s + MAX_HOLD_S)
    got += held.take_ready()
    assert not held
    for (name, choice), num_tokens in given_tokens.items():
        own = [each for each in got if (each.request_id, each.choice_index) == (name, choice)]
        at, text = 0, ""
        for each in own:
            assert each.first_token_index == at
            at += len(each.token_ids) + each.num_unlisted_tokens
            text += each.text
            if each.events:
                assert framed
                document = json.loads(each.events.removeprefix(b"data: "))
                assert document["index"] == choice
                text += document["text"]
        assert at == num_tokens
        assert text == "".join(f"<{index}>\n" for index in range(num_tokens))
        listed = [token_id for each in own for token_id in each.token_ids]
        assert listed == ([] if framed and not wants_token_ids else list(range(num_tokens)))
        assert [each.num_cached_tokens for each in own] == [3] + [None] * (len(own) - 1)


def test_first_tokens_ends_and_words_do_not_wait_and_take_what_was_held_along() -> None:
    held = HeldDeltas(0.0)
    held.take(request("a"))
    held.add(delta("a", 0, 0))
    assert [each.token_ids for each in held.take_ready()] == [(0,)]
    held.add(delta("a", 0, 1))
    held.release(0.0)
    assert held.take_ready() == ()
    held.add(delta("a", 0, 2, "length"))
    assert [(each.token_ids, each.finish_reason) for each in held.take_ready()] == [((1, 2), "length")]
    held.add(delta("a", 1, 0))
    error = TokenDelta(
        request_id=RequestId("a"), choice_index=1, epoch=Epoch(0), first_token_index=1, finish_reason="error"
    )
    held.add(error)
    assert [each.finish_reason for each in held.take_ready()] == [None, "error"]
    assert not held.open


def test_what_does_not_continue_is_not_joined() -> None:
    """So that a gap, a repeat or another attempt is seen for what it is."""
    held = HeldDeltas(0.0)
    held.take(request("a"))
    held.add(delta("a", 0, 0))
    for index, epoch in ((1, 0), (3, 0), (3, 0), (4, 1)):
        held.add(msgspec.structs.replace(delta("a", 0, index), epoch=Epoch(epoch)))
    held.release(1.0)
    assert [(each.first_token_index, each.epoch) for each in held.take_ready()] == [
        (0, 0),
        (1, 0),
        (3, 0),
        (3, 0),
        (4, 1),
    ]


@pytest.mark.parametrize(("num_requests", "step_s", "expected"), [(1, 0.013, 1), (32, 0.013, 3), (32, 0.06, 1)])
def test_few_streams_get_every_token_and_many_get_several_at_once(
    num_requests: int, step_s: float, expected: int
) -> None:
    names = [f"r{i}" for i in range(num_requests)]
    held = HeldDeltas(0.0)
    for name in names:
        held.take(request(name))
    num_chunks, num_steps = 0, 60
    for step in range(num_steps):
        for name in names:
            held.add(delta(name, 0, step))
        held.release(step * step_s)
        num_chunks += len(held.take_ready())
    assert num_chunks / num_requests == pytest.approx(num_steps / expected, abs=2)
    assert num_chunks <= (num_steps * step_s + MAX_HOLD_S) * MAX_CHUNKS_PER_S + num_requests


def test_nothing_is_left_of_a_request_that_was_dropped() -> None:
    held = HeldDeltas(0.0)
    held.take(request("a"))
    held.add(delta("a", 0, 0))
    held.take_ready()
    held.add(delta("a", 0, 1))
    held.drop(RequestId("a"))
    held.release(1.0)
    assert held.take_ready() == ()
