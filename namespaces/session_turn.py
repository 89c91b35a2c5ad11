"""Where the turns of a session lie in its token log."""

from __future__ import annotations

from typing import Literal

import msgspec

#: chat: messages under the model's template; text: tokens as they were sent.
TurnKind = Literal["chat", "text"]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Where one turn lies in the log: prompt [start, prompt_end), answer [prompt_end, end)."""

    kind: TurnKind
    start: int
    prompt_end: int
    end: int
    #: JSON of the messages that were sent; the answer's text is in the tokens.
    messages_json: bytes = b"[]"
    finish_reason: str = ""


def cut_turns(turns: tuple[Turn, ...], num_tokens: int) -> tuple[Turn, ...]:
    """The turns of the first `num_tokens` tokens; the last may lose its end."""
    kept = [turn for turn in turns if turn.start < num_tokens]
    if kept and kept[-1].end > num_tokens:
        last = kept[-1]
        kept[-1] = msgspec.structs.replace(
            last, prompt_end=min(last.prompt_end, num_tokens), end=num_tokens, finish_reason="truncated"
        )
    return tuple(kept)


def without_range(turn: Turn, start: int, end: int) -> Turn:
    """The turn when the tokens [start, end) have left the log."""

    def moved(position: int) -> int:
        return position - (min(max(position, start), end) - start)

    return msgspec.structs.replace(
        turn, start=moved(turn.start), prompt_end=moved(turn.prompt_end), end=moved(turn.end)
    )
