"""What was asked and answered, as attributes of the request's span: only where the configuration asks for it.

The shape is that of OpenTelemetry's GenAI conventions: [{"role": ..., "parts": [{"type": "text", "content": ...}]}].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from opentelemetry.trace import Span

from remora.deployments.engine.messages import TokenDelta
from remora.platform.base import telemetry_names as names

#: Longest text of one message that a span holds; the rest is cut off.
MAX_CHARS: Final = 20_000


class SpanContent:
    """Collects the texts of one request; does nothing unless `enabled`."""

    def __init__(self, span: Span, *, enabled: bool) -> None:
        self._span = span
        self.is_enabled = enabled
        self._answers: dict[int, str] = {}

    def asked(self, messages: Iterable[dict[str, Any]]) -> None:
        """The messages of a chat, or prompts as messages of the user."""
        if self.is_enabled:
            shown = [_message(str(each.get("role", "")), each.get("content")) for each in messages]
            self._span.set_attribute(names.GEN_AI_INPUT_MESSAGES, msgspec.json.encode(shown).decode())

    def said(self, deltas: Iterable[tuple[int, TokenDelta]]) -> None:
        if self.is_enabled:
            for index, delta in deltas:
                text = self._answers.get(index, "")
                if len(text) < MAX_CHARS:
                    self._answers[index] = text + delta.text

    def end(self) -> None:
        if self._answers:
            shown = [_message("assistant", self._answers[index]) for index in sorted(self._answers)]
            self._span.set_attribute(names.GEN_AI_OUTPUT_MESSAGES, msgspec.json.encode(shown).decode())


def _message(role: str, content: Any) -> dict[str, Any]:
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return {"role": role, "parts": [{"type": "text", "content": text[:MAX_CHARS]}]}
