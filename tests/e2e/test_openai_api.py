"""The official OpenAI client, unchanged, against two real models."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("model", ["smollm2", "smollm2-int8"])
def test_a_chat_answers_whole_and_streamed_alike(client: Any, model: str) -> None:
    arguments = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    assert "Paris" in whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
