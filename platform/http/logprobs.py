"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math

from remora.deployments.engine.messages import TokenDelta, TokenLogprob
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.http.api_types import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

#: JSON has no infinity; what vLLM sends for a token that was impossible.
_LOWEST = -9999.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST


def chat_logprobs(delta: TokenDelta, tokenizer: ChatTokenizer) -> ChatLogprobs | None:
    """Of a delta's tokens; None if none were asked for. The alternatives do not repeat the chosen token's entry."""
    if not delta.logprobs:
        return None

    def shown(entry: TokenLogprob) -> TopLogprob:
        raw = tokenizer.token_bytes(entry.token_id)
        return TopLogprob(raw.decode(errors="replace"), _finite(entry.logprob), list(raw))

    content = []
    for chosen, *alternatives in delta.logprobs:
        top = shown(chosen)
        content.append(ChatLogprob(top.token, top.logprob, top.bytes, [shown(each) for each in alternatives]))
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """Keeps a choice's place in its text while its deltas come."""

    def __init__(self, text_offset: int = 0) -> None:
        self._offset = text_offset

    def write(self, delta: TokenDelta, tokenizer: ChatTokenizer) -> CompletionLogprobs | None:
        """Of a delta's tokens; None if none were asked for."""
        if not delta.logprobs:
            return None
        written = CompletionLogprobs()
        for chosen, *alternatives in delta.logprobs:
            text = tokenizer.token_text(chosen.token_id)
            written.tokens.append(text)
            written.token_logprobs.append(_finite(chosen.logprob))
            written.text_offset.append(self._offset)
            # Two tokens can show as the same text (parts of a character): the likelier one is kept.
            top: dict[str, float] = {}
            for each in (chosen, *alternatives):
                shown = tokenizer.token_text(each.token_id)
                top[shown] = max(top.get(shown, _LOWEST), _finite(each.logprob))
            written.top_logprobs.append(top)
            self._offset += len(text)
        return written
