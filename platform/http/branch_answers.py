"""The branches of a session as one answer in OpenAI's shape: choice `i` is branch `i`.

A branch that fails ends with `finish_reason` "error" and says why in `branch.error`. It is no error of the stream, for
at such a one OpenAI's clients stop reading.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import Request, Response

from remora.cache_actors.session_client import ask
from remora.namespaces.session_commands import SessionHead, ShowSession
from remora.platform.base.ids import SessionId
from remora.platform.http.api_types import (
    BranchChatChunk,
    BranchChatCompletion,
    BranchCompletion,
    BranchTextChunk,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionChoice,
)
from remora.platform.http.branch_request import ForkBody, branch_requests
from remora.platform.http.branch_run import BranchRun
from remora.platform.http.branches import Branches
from remora.platform.http.choice_writers import ChatChoiceWriter, TextChoiceWriter
from remora.platform.http.disconnect import until_disconnect
from remora.platform.http.errors import error_document
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.services import Services
from remora.platform.http.sse import DONE, EventStream, event

FAILED = "error"


async def fork_branches(services: Services, request: Request, session_id: SessionId, body: ForkBody) -> Response:
    """Answers a call with branches. Raises what is wrong with the call, and what every branch failed of."""
    command = ShowSession(session_id=session_id, with_tokens=True)
    parent = (await ask(services.turns.port, command, SessionHead)).state
    wanted = branch_requests(session_id, parent.model_id, body)
    branches = Branches(services, request, parent, wanted, body.num_tokens)
    first = wanted[0].fields
    try:
        async with until_disconnect(request.receive):
            await branches.open()
            answer = None if first.stream else await whole_answer(branches)
    except BaseException as error:
        branches.finish(error)
        raise
    if answer is None:
        chunks = answer_chunks(branches, include_usage=first.include_usage)
        return EventStream(chunks, on_end=branches.finish, headers=branches.headers())
    branches.finish()
    return MsgspecJSONResponse(answer, headers=branches.headers())


async def whole_answer(branches: Branches) -> BranchChatCompletion | BranchCompletion:
    """All branches, once all have ended."""
    writers: dict[int, ChatChoiceWriter | TextChoiceWriter] = {}
    while events := await branches.next_events():
        for run, deltas in events:
            for delta in deltas or ():
                _writer(branches, writers, run).add(delta)
    choices: list[Any] = []
    for run in branches.runs:
        choice = writers[run.index].whole() if run.index in writers else _empty(branches, run.index)
        if run.error is not None:
            choice.finish_reason = FAILED
        choices.append(choice)
    kind = BranchChatCompletion if branches.is_chat else BranchCompletion
    return kind(
        id=branches.id,
        created=int(time.time()),
        model=branches.model_id,
        system_fingerprint=branches.runs[0].system_fingerprint,
        choices=choices,
        usage=branches.usage(),
        branches=[run.described(ended=True, error=_error(run)) for run in branches.runs],
    )


async def answer_chunks(branches: Branches, *, include_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events. All deltas that are there leave in one piece."""
    kind = BranchChatChunk if branches.is_chat else BranchTextChunk
    chunk = kind(
        id=branches.id,
        created=int(time.time()),
        model=branches.model_id,
        system_fingerprint="",
        choices=[],
        usage=None if include_usage else msgspec.UNSET,
    )
    writers: dict[int, ChatChoiceWriter | TextChoiceWriter] = {}
    while events := await branches.next_events():
        parts: list[bytes] = []
        for run, deltas in events:
            chunk.system_fingerprint = run.system_fingerprint
            choices: list[Any] = []
            for delta in deltas or ():
                choices += _writer(branches, writers, run).chunks(delta)
            if deltas is None and run.error is not None:
                choices = [_failed_chunk(branches, run.index)]
            for choice in choices:
                is_last = choice.finish_reason is not None
                chunk.choices = [choice]
                chunk.branch = run.described(ended=is_last, error=_error(run))
                parts.append(event(chunk))
        if parts:
            yield b"".join(parts)
    branches.finish()
    if include_usage:
        chunk.choices, chunk.branch, chunk.usage = [], msgspec.UNSET, branches.usage()
        yield event(chunk) + DONE
    else:
        yield DONE


def _writer(
    branches: Branches, writers: dict[int, ChatChoiceWriter | TextChoiceWriter], run: BranchRun
) -> ChatChoiceWriter | TextChoiceWriter:
    if run.index not in writers:
        kind = ChatChoiceWriter if branches.is_chat else TextChoiceWriter
        writers[run.index] = kind(run.index, run.tokenizer)
    return writers[run.index]


def _empty(branches: Branches, index: int) -> ChatChoice | CompletionChoice:
    return ChatChoice(index, ChatMessage("")) if branches.is_chat else CompletionChoice(index, "")


def _failed_chunk(branches: Branches, index: int) -> ChatChunkChoice | CompletionChoice:
    if branches.is_chat:
        return ChatChunkChoice(index, ChatDelta(), None, FAILED)
    return CompletionChoice(index, "", None, FAILED)


def _error(run: BranchRun) -> dict[str, str | None] | None:
    return None if run.error is None else error_document(run.error)["error"]
