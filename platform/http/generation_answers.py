"""A generation as one answer in OpenAI's shape, of chats and of text: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from remora.platform.base.errors import RemoraError
from remora.platform.http.api_types import ChatCompletion, ChatCompletionChunk, Completion
from remora.platform.http.choice_writers import ChatChoiceWriter, TextChoiceWriter
from remora.platform.http.errors import error_document
from remora.platform.http.generation import ChoiceDelta, Generation
from remora.platform.http.sse import DONE, event

#: One for each choice.
Writers = Sequence[ChatChoiceWriter] | Sequence[TextChoiceWriter]


async def whole_answer(
    kind: type[ChatCompletion | Completion], generation: Generation, first: list[ChoiceDelta], writers: Writers
) -> ChatCompletion | Completion:
    """Everything, once every choice has ended. `first`: the deltas that are read already."""
    deltas = first
    while deltas:
        for index, delta in deltas:
            writers[index].add(delta)
        deltas = await generation.next_deltas()
    choices: list[Any] = [writer.whole() for writer in writers]
    return kind(
        id=generation.id,
        created=generation.created,
        model=generation.model_id,
        system_fingerprint=generation.system_fingerprint,
        choices=choices,
        usage=generation.usage(),
    )


async def answer_chunks(
    kind: type[ChatCompletionChunk | Completion],
    generation: Generation,
    first: list[ChoiceDelta],
    writers: Writers,
    *,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """Server-sent events. All deltas of one step leave in one piece. `first`: the deltas that are read already."""
    chunk = kind(
        id=generation.id,
        created=generation.created,
        model=generation.model_id,
        system_fingerprint=generation.system_fingerprint,
        choices=[],
        usage=None if include_usage else msgspec.UNSET,
    )
    choice: Any
    deltas = first
    try:
        while deltas:
            parts: list[bytes] = []
            for index, delta in deltas:
                for choice in writers[index].chunks(delta):
                    chunk.choices = [choice]
                    parts.append(event(chunk))
            if parts:
                yield b"".join(parts)
            deltas = await generation.next_deltas()
    except RemoraError as error:
        generation.finish(error)
        yield event(error_document(error)) + DONE
        return
    if include_usage:
        chunk.choices, chunk.usage = [], generation.usage()
        yield event(chunk) + DONE
    else:
        yield DONE
