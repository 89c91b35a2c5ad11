"""What the OpenAI-compatible endpoints answer, field by field as OpenAI documents it."""

from __future__ import annotations

from typing import Any

import msgspec


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    cached_tokens: int
    #: Of those, tokens of a session whose KV was converted from another precision for this turn. Left out if 0.
    converted_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# ---- completions -----------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    #: Where each token starts in the choice's text.
    text_offset: list[int] = []
    token_logprobs: list[float] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float]] = []


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    #: vLLM: the stop string or token id that ended it.
    stop_reason: str | int | None = None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# ---- chat ------------------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    #: Absent unless asked for; then null in all chunks but the last.
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# ---- branches of a session -------------------------------------------------------------------------------------------


class Branch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What OpenAI has no place for: which session a branch goes on as, and how it ended."""

    index: int
    #: None: it is not kept.
    session_id: str | None
    #: If it is another than the parent's.
    model: str | None = None
    #: From its end on: how the parent's tokens got to another model (session_models.transfer_document).
    transfer: dict[str, object] | None = None
    #: From its end on.
    usage: Usage | None = None
    #: As error_document makes it, without its outer level.
    error: dict[str, str | None] | None = None


class BranchChatCompletion(ChatCompletion, kw_only=True):
    branches: list[Branch]


class BranchCompletion(Completion, kw_only=True):
    branches: list[Branch]


class BranchChatChunk(ChatCompletionChunk, kw_only=True):
    #: Of which branch this is; its index is the choice's as well. Absent in the chunk of the whole usage.
    branch: Branch | msgspec.UnsetType = msgspec.UNSET


class BranchTextChunk(Completion, kw_only=True):
    branch: Branch | msgspec.UnsetType = msgspec.UNSET


class ListAnswer(msgspec.Struct):
    """OpenAI's list object."""

    data: list[dict[str, Any]]
    object: str = "list"
