"""What a request adds to its session: the tokens behind the log, and how the log describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from remora.deployments.models.chat_continuation import join_continuation, render_continuation
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.namespaces.session_log import SessionState, unpack_tokens
from remora.namespaces.session_turn import TurnKind
from remora.platform.base.errors import InvalidRequest
from remora.platform.http.chat_request import ChatRequest
from remora.platform.http.completion_request import CompletionRequest
from remora.platform.http.services import encode


class SessionLog(Protocol):
    """A session's tokens, to go on behind: a turn that writes it, or what was read of it."""

    @property
    def state(self) -> SessionState: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...


class ReadLog:
    """A log that is gone on from, but not written to."""

    def __init__(self, state: SessionState) -> None:
        """`state` must have its tokens."""
        self.state = state
        self.token_ids = unpack_tokens(state.token_bytes)


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """`added` goes behind the session's log."""

    kind: TurnKind
    added: tuple[int, ...]
    messages_json: bytes


async def chat_prompt(tokenizer: ChatTokenizer, body: ChatRequest, log: SessionLog) -> TurnPrompt:
    """The new messages under the model's template. Raises InvalidRequest naming the message."""
    if log.state.ends_in_prompt:
        raise InvalidRequest(
            "messages: the session was truncated inside a prompt; truncate it to the end of a turn first, "
            "or go on with /v1/completions.",
            field="messages",
        )
    added = await rendered_behind(
        tokenizer,
        body.messages,
        log.token_ids,
        add_generation_prompt=body.add_generation_prompt,
        arguments=body.chat_template_kwargs,
    )
    return TurnPrompt("chat", added, msgspec.json.encode(body.messages))


async def rendered_behind(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    log: Sequence[int],
    *,
    add_generation_prompt: bool = True,
    arguments: Mapping[str, Any] | None = None,
    field: str = "messages",
) -> tuple[int, ...]:
    """What messages put behind the log, which may be empty, under the model's template. Raises InvalidRequest."""
    if log:
        text = render_continuation(
            tokenizer, messages, add_generation_prompt=add_generation_prompt, arguments=arguments
        )
    else:
        text = tokenizer.render(messages, None, add_generation_prompt=add_generation_prompt, arguments=arguments)
    # The template has written the special tokens itself.
    return join_continuation(tokenizer, log, await encode(tokenizer, text, add_special_tokens=False, field=field))


async def text_prompt(tokenizer: ChatTokenizer, body: CompletionRequest, log: SessionLog) -> TurnPrompt:
    """The one prompt of the request; only the first of a session gets the model's opening token."""
    (prompt,) = body.prompt
    if isinstance(prompt, str):
        added = await encode(tokenizer, prompt, add_special_tokens=not log.token_ids, field="prompt")
        described = prompt
    else:
        tokenizer.check_ids(prompt, field="prompt")
        added, described = prompt, tokenizer.decode(prompt, field="prompt")
    return TurnPrompt("text", added, msgspec.json.encode([{"role": "user", "content": described}]))
