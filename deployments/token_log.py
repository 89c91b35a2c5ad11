"""What a client has received of one request so far: decides which deltas may go on to it."""

from __future__ import annotations

from typing import Literal

from remora.deployments.engine.messages import FinishReason, TokenDelta
from remora.platform.base.errors import IntegrityError

Verdict = Literal["forward", "repeat", "gap"]


class TokenLog:
    """Output tokens per choice, in order and without holes. One owner, one thread.

    Of tokens whose ids are not sent along it only keeps the number.
    """

    def __init__(self, num_choices: int) -> None:
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._num_tokens = [0] * num_choices
        self._finish_reasons: list[FinishReason | None] = [None] * num_choices

    def judge(self, delta: TokenDelta) -> Verdict:
        """Whether the delta continues its choice. Changes nothing.

        "repeat": the client has it already, or the choice has ended. "gap": tokens before it are missing, or it
        overlaps what the client has, so that its text cannot be cut; generation must resume from this log.
        """
        if not 0 <= delta.choice_index < len(self._token_ids):
            return "repeat"
        if self._finish_reasons[delta.choice_index] is not None:
            return "repeat"
        expected = self._num_tokens[delta.choice_index]
        if delta.first_token_index == expected:
            return "forward"
        end = delta.first_token_index + len(delta.token_ids) + delta.num_unlisted_tokens
        if delta.first_token_index < expected and end <= expected and delta.finish_reason is None:
            return "repeat"
        return "gap"

    def append(self, delta: TokenDelta) -> None:
        """Records a delta that `judge` called "forward"."""
        if self.judge(delta) != "forward":
            raise IntegrityError(
                f"delta at token {delta.first_token_index} of choice {delta.choice_index} does not continue its log"
            )
        self._token_ids[delta.choice_index].extend(delta.token_ids)
        self._num_tokens[delta.choice_index] += len(delta.token_ids) + delta.num_unlisted_tokens
        self._finish_reasons[delta.choice_index] = delta.finish_reason

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(reason is not None for reason in self._finish_reasons)

    @property
    def empty(self) -> bool:
        """Whether the client has nothing yet, neither a token nor an end."""
        return not any(self._num_tokens) and not any(self._finish_reasons)

    def finished_choices(self) -> tuple[int, ...]:
        return tuple(index for index, reason in enumerate(self._finish_reasons) if reason is not None)

    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Per choice, for resuming elsewhere. Raises IntegrityError when the ids of some were not sent along."""
        if sum(map(len, self._token_ids)) != self.num_tokens:
            raise IntegrityError("the ids of these tokens are not known")
        return tuple(tuple(ids) for ids in self._token_ids)

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(self._num_tokens)
