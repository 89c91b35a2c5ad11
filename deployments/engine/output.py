"""What one choice says: tokens in, whole text and the end out; and the deltas of a step, by router."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from remora.deployments.engine.base import Detokenizer
from remora.deployments.engine.messages import (
    FinishReason,
    GenerationRequest,
    Handover,
    SamplingParams,
    TokenDelta,
)
from remora.deployments.engine.stop import StopText
from remora.platform.base.errors import RemoraError, error_class
from remora.platform.base.ids import RouterId

if TYPE_CHECKING:
    from remora.deployments.engine.sampler import Sampled
    from remora.deployments.engine.sequence import Sequence


class Step(NamedTuple):
    """What one more token makes certain."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputText:
    """One choice's output: a pure function of its tokens, so that pushing a token log again gives the same state."""

    __slots__ = ("_detokenizer", "_eos_token_ids", "_max_tokens", "_num_tokens", "_params", "_stop_text")

    def __init__(
        self, detokenizer: Detokenizer, params: SamplingParams, *, eos_token_ids: Collection[int], max_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._max_tokens = max_tokens
        self._stop_text = StopText(params.stop, include_in_output=params.include_stop_str_in_output)
        self._num_tokens = 0

    def ends_at(self, token_id: int) -> bool:
        """Whether the token is an end by itself, whatever its text."""
        return token_id in self._eos_token_ids or token_id in self._params.stop_token_ids

    def push(self, token_id: int) -> Step:
        """Takes the next token. Its text may leave; after a finish reason nothing may be pushed any more.

        The text of a token that ends the output is left out unless include_stop_str_in_output is set.
        """
        self._num_tokens += 1
        if self.ends_at(token_id):
            stop_reason = None if token_id in self._eos_token_ids else token_id
            text = self._stop_text.flush()
            if self._params.include_stop_str_in_output:
                text += self._detokenizer.push(token_id)
            return Step(text, "stop", stop_reason)
        text, stop = self._stop_text.push(
            self._detokenizer.push(token_id), may_stop=self._num_tokens > self._params.min_tokens
        )
        if stop is not None:
            return Step(text, "stop", stop)
        if self._num_tokens >= self._max_tokens:
            return Step(text + self.close(), "length")
        return Step(text)

    def close(self) -> str:
        """The text that was held back, when the output ends for a reason outside itself."""
        text, _ = self._stop_text.push(self._detokenizer.flush(), may_stop=False)
        return text + self._stop_text.flush()


class Outbox:
    """Deltas that wait for the end of the step."""

    def __init__(self) -> None:
        self._deltas: dict[RouterId, list[TokenDelta]] = {}

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def add(self, router_id: RouterId, delta: TokenDelta) -> None:
        self._deltas.setdefault(router_id, []).append(delta)

    def take(self) -> list[tuple[RouterId, tuple[TokenDelta, ...]]]:
        """One group a router, in the order in which deltas were added; empties the box."""
        taken = [(router_id, tuple(deltas)) for router_id, deltas in self._deltas.items()]
        self._deltas.clear()
        return taken


def token_delta(
    sequence: Sequence,
    token_ids: tuple[int, ...],
    text: str,
    sampled: Sampled | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: str | int | None = None,
    *,
    is_ready: bool = False,
    handover: Handover | None = None,
) -> TokenDelta:
    """What a choice produced, behind what it has sent."""
    live = sequence.live
    is_quiet = sequence.has_sent or is_ready or handover is not None
    return TokenDelta(
        request_id=live.request.request_id,
        choice_index=sequence.choice_index,
        epoch=live.request.epoch,
        first_token_index=sequence.num_sent_tokens,
        token_ids=token_ids,
        text=text,
        logprobs=(sampled.logprobs,) if sampled is not None and sampled.logprobs else (),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=None if is_quiet else live.num_cached_tokens,
        num_copied_tokens=0 if is_quiet else live.num_copied_tokens,
        num_converted_tokens=0 if is_quiet else live.num_converted_tokens,
        context=sequence.window.outcome() if finish_reason is not None else None,
        is_ready=is_ready,
        handover=handover,
    )


def error_delta(
    request: GenerationRequest, choice_index: int, first_token_index: int, error: BaseException
) -> TokenDelta:
    """The end of a choice by an error; its name is the nearest class of the error tree."""
    kinds = (*type(error).__mro__, RemoraError)
    name = next(kind.__name__ for kind in kinds if error_class(kind.__name__) is kind)
    return TokenDelta(
        request_id=request.request_id,
        choice_index=choice_index,
        epoch=request.epoch,
        first_token_index=first_token_index,
        token_ids=(),
        text="",
        finish_reason="error",
        error=name,
        error_message=str(error) or type(error).__name__,
        retry_after_s=error.retry_after_s if isinstance(error, RemoraError) else None,
    )
