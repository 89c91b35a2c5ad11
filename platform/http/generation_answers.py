"""A generation as one answer in OpenAI's shape, of chats and of text: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from remora.deployments.engine.messages import EventFrame
from remora.platform.base.errors import RemoraError
from remora.platform.http.api_types import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
)
from remora.platform.http.choice_writers import ChatChoiceWriter, TextChoiceWriter
from remora.platform.http.errors import error_document
from remora.platform.http.generation import ChoiceDelta, Generation, MakeFrame
from remora.platform.http.sse import DONE, event

#: A text that stands for all others, and how it is written; no other part of an event can be equal to it.
_ANY_TEXT = "\0text\0"
_ANY_TEXT_JSON = msgspec.json.encode(_ANY_TEXT)

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
    chunk = _chunk(kind, generation, include_usage=include_usage)
    choice: Any
    deltas = first
    try:
        while deltas:
            parts: list[bytes] = []
            for index, delta in deltas:
                for choice in writers[index].chunks(delta):
                    chunk.choices = [choice]
                    parts.append(event(chunk))
                if delta.events:
                    parts.append(delta.events)
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


def frame_maker(kind: type[ChatCompletionChunk | Completion], *, include_usage: bool) -> MakeFrame:
    """For streams: their events of plain text, as `answer_chunks` writes them, to be made where the text is."""

    def make(generation: Generation, index: int) -> EventFrame:
        chunk = _chunk(kind, generation, include_usage=include_usage)
        choice: Any = CompletionChoice(index, _ANY_TEXT)
        if kind is ChatCompletionChunk:
            choice = ChatChunkChoice(index, ChatDelta(content=_ANY_TEXT))
        chunk.choices = [choice]
        head, _, tail = event(chunk).partition(_ANY_TEXT_JSON)
        return EventFrame(head, tail)

    return make


def _chunk(
    kind: type[ChatCompletionChunk | Completion], generation: Generation, *, include_usage: bool
) -> ChatCompletionChunk | Completion:
    return kind(
        id=generation.id,
        created=generation.created,
        model=generation.model_id,
        system_fingerprint=generation.system_fingerprint,
        choices=[],
        usage=None if include_usage else msgspec.UNSET,
    )
