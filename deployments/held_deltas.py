"""Deltas on their way from an engine to one router, a while held back so that several of a choice leave as one.

What somebody waits for leaves with its step: first tokens, ends, errors, words about moves. All else leaves so often
that all choices together make no more than MAX_CHUNKS_PER_S chunks: each token of a few streams, several at once of
many, never later than MAX_HOLD_S. A chunk costs the same, up to the client's parser, however much is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from remora.deployments.engine.messages import EventFrame, GenerationRequest, TokenDelta
from remora.platform.base.ids import RequestId

#: Chunks that a router sends in a second for one replica: about a fifth of a core, HAProxy's and the client's included.
MAX_CHUNKS_PER_S = 1000.0
MAX_HOLD_S = 0.05

_encode = msgspec.json.Encoder().encode


class _Open:
    """A request of which something is to come."""

    __slots__ = ("frames", "has_begun", "num_choices", "wants_token_ids")

    def __init__(self, request: GenerationRequest) -> None:
        self.num_choices = request.num_choices
        self.frames = request.frames
        self.wants_token_ids = request.wants_token_ids
        self.has_begun = False


class HeldDeltas:
    """Of one feed. `ready` is what may leave, in order."""

    def __init__(self, now_s: float) -> None:
        #: Of each request that was taken and has not ended.
        self.open: dict[RequestId, _Open] = {}
        self.ready: list[TokenDelta] = []
        self._held: dict[tuple[RequestId, int], list[TokenDelta]] = {}
        self._released_s = now_s

    def __bool__(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    @property
    def due_s(self) -> float:
        """When all that is held may leave."""
        return self._released_s + min(MAX_HOLD_S, len(self.open) / MAX_CHUNKS_PER_S)

    def take(self, request: GenerationRequest) -> None:
        self.open[request.request_id] = _Open(request)

    def drop(self, request_id: RequestId) -> None:
        """Forgets a request: nobody wants what is left of it."""
        if self.open.pop(request_id, None) is not None:
            for key in [key for key in self._held if key[0] == request_id]:
                del self._held[key]

    def add(self, delta: TokenDelta) -> None:
        """Of a step."""
        key = (delta.request_id, delta.choice_index)
        request = self.open.get(delta.request_id)
        held = self._held.get(key)
        if held is not None and not _continues(held[-1], delta):
            self._release(key)
        if _is_word(delta):
            self._release(key)
            self.ready.append(delta)
        else:
            self._held.setdefault(key, []).append(delta)
            if request is None or not request.has_begun or delta.finish_reason is not None:
                self._release(key)
        if request is None:
            return
        if delta.token_ids:
            request.has_begun = True
        if delta.finish_reason is not None:
            request.num_choices -= 1
            if delta.finish_reason == "error" or not request.num_choices:
                del self.open[delta.request_id]

    def release(self, now_s: float) -> None:
        """Lets everything leave that is due."""
        if self._held and now_s >= self.due_s:
            self._released_s = now_s
            for key in list(self._held):
                self._release(key)

    def take_ready(self) -> tuple[TokenDelta, ...]:
        ready, self.ready = tuple(self.ready), []
        return ready

    def _release(self, key: tuple[RequestId, int]) -> None:
        if deltas := self._held.pop(key, None):
            delta = _joined(deltas)
            request = self.open.get(delta.request_id)
            self.ready.append(delta if request is None or not request.frames else _framed(delta, request))


def _is_word(delta: TokenDelta) -> bool:
    """Whether it says something about the request instead of going on with it."""
    return delta.is_ready or delta.handover is not None or delta.finish_reason in ("error", "abort")


def _continues(before: TokenDelta, delta: TokenDelta) -> bool:
    """Whether the two can be one: the router judges each by where it begins."""
    end = before.first_token_index + len(before.token_ids)
    return delta.epoch == before.epoch and delta.first_token_index == end


def _joined(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Deltas of one choice that follow each other, as one."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return msgspec.structs.replace(
        first,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join([delta.text for delta in deltas]),
        logprobs=tuple(each for delta in deltas for each in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        context=last.context,
    )


def _framed(delta: TokenDelta, request: _Open) -> TokenDelta:
    """With its text as an event. An end stays as it is: it is more than a text."""
    if delta.finish_reason is not None:
        return delta
    frame: EventFrame = request.frames[delta.choice_index]
    events = b"".join((frame.head, _encode(delta.text), frame.tail)) if delta.text else b""
    if request.wants_token_ids:
        return msgspec.structs.replace(delta, text="", events=events)
    num_tokens = len(delta.token_ids)
    return msgspec.structs.replace(delta, text="", events=events, token_ids=(), num_unlisted_tokens=num_tokens)
