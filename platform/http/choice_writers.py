"""One choice's deltas in OpenAI's two shapes: as the choices of stream chunks, or gathered into one answer."""

from __future__ import annotations

from remora.deployments.engine.messages import TokenDelta
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.http.api_types import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
)
from remora.platform.http.logprobs import CompletionLogprobsWriter, chat_logprobs


class ChatChoiceWriter:
    """Either `chunks` or `add` and `whole`, for every delta in order."""

    def __init__(self, index: int, tokenizer: ChatTokenizer) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._opened = False
        self._texts: list[str] = []
        self._choice = ChatChoice(index, ChatMessage(""))

    def chunks(self, delta: TokenDelta) -> list[ChatChunkChoice]:
        """What a stream says of the delta, a chunk each: the role first, the finish reason last, on their own."""
        written: list[ChatChunkChoice] = []
        if not self._opened:
            self._opened = True
            written.append(ChatChunkChoice(self._index, ChatDelta(role="assistant", content="")))
        logprobs = chat_logprobs(delta, self._tokenizer)
        if delta.text or logprobs is not None:
            written.append(ChatChunkChoice(self._index, ChatDelta(content=delta.text), logprobs))
        if delta.finish_reason is not None:
            written.append(ChatChunkChoice(self._index, ChatDelta(), None, delta.finish_reason, delta.stop_reason))
        return written

    def add(self, delta: TokenDelta) -> None:
        choice = self._choice
        self._texts.append(delta.text)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        logprobs = chat_logprobs(delta, self._tokenizer)
        if logprobs is not None:
            choice.logprobs = ChatLogprobs((choice.logprobs.content if choice.logprobs else []) + logprobs.content)

    def whole(self) -> ChatChoice:
        """Everything that was added."""
        self._choice.message.content = "".join(self._texts)
        return self._choice


class TextChoiceWriter:
    """Either `chunks` or `add` and `whole`, for every delta in order. `echo` goes before the first text."""

    def __init__(self, index: int, tokenizer: ChatTokenizer, echo: str = "") -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._echo = echo
        self._texts = [echo]
        self._logprobs = CompletionLogprobsWriter()
        self._choice = CompletionChoice(index, "")

    def chunks(self, delta: TokenDelta) -> list[CompletionChoice]:
        """What a stream says of the delta: one chunk, or none when there is nothing to say."""
        text, self._echo = self._echo + delta.text, ""
        logprobs = self._logprobs.write(delta, self._tokenizer)
        if not text and logprobs is None and delta.finish_reason is None:
            return []
        return [CompletionChoice(self._index, text, logprobs, delta.finish_reason, delta.stop_reason)]

    def add(self, delta: TokenDelta) -> None:
        choice = self._choice
        self._texts.append(delta.text)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        choice.logprobs = _joined(choice.logprobs, self._logprobs.write(delta, self._tokenizer))

    def whole(self) -> CompletionChoice:
        """Everything that was added."""
        self._choice.text = "".join(self._texts)
        return self._choice


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or second is None:
        return first or second
    for field in CompletionLogprobs.__struct_fields__:
        getattr(first, field).extend(getattr(second, field))
    return first
