"""TokenLog: whatever arrives, the client gets each token once and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.engine.messages import FinishReason, TokenDelta
from remora.deployments.token_log import TokenLog
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import Epoch, RequestId

LENGTH = 12


def delta(start: int, end: int, choice: int = 0) -> TokenDelta:
    """Tokens start..end of a choice whose tokens count up; the last one ends it."""
    reason: FinishReason | None = "length" if end == LENGTH else None
    return TokenDelta(
        request_id=RequestId("q"), choice_index=choice, epoch=Epoch(0), first_token_index=start,
        token_ids=tuple(range(start, end)), text="", finish_reason=reason,
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 4), st.integers(0, 1)), max_size=60),
)
def test_forwarded_tokens_are_always_a_prefix(pieces: list[tuple[int, int, int]]) -> None:
    log = TokenLog(2)
    for start, length, choice in pieces:
        piece = delta(start, min(start + length, LENGTH), choice)
        have = log.token_ids()[choice]
        verdict = log.judge(piece)
        if verdict == "forward":
            log.append(piece)
        elif verdict == "repeat":
            assert set(piece.token_ids) <= set(have) or choice in log.finished_choices()
        else:
            assert piece.first_token_index != len(have)
    for index, tokens in enumerate(log.token_ids()):
        assert tokens == tuple(range(len(tokens)))
        assert (index in log.finished_choices()) == (len(tokens) == LENGTH)
    assert log.finished == (log.num_tokens == 2 * LENGTH)


def test_an_end_without_tokens_is_forwarded_once() -> None:
    log = TokenLog(1)
    log.append(delta(0, 3))
    end = TokenDelta(
        request_id=RequestId("q"), choice_index=0, epoch=Epoch(0), first_token_index=3, token_ids=(), text="",
        finish_reason="stop",
    )  # fmt: skip
    assert log.judge(end) == "forward"
    log.append(end)
    assert log.finished
    assert log.judge(end) == "repeat"


def test_a_choice_that_does_not_exist_is_never_forwarded() -> None:
    assert TokenLog(1).judge(delta(0, 1, choice=1)) == "repeat"


def test_appending_out_of_order_is_a_bug() -> None:
    with pytest.raises(IntegrityError):
        TokenLog(1).append(delta(2, 3))
