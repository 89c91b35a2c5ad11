"""Body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from remora.platform.base.errors import InvalidRequest
from remora.platform.http.generation_fields import GenerationFields


class ChatRequest(GenerationFields):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None, "medium"),
        "echo": (None, False),
        "continue_final_message": (None, False),
        "chat_template": (None,),
        "documents": (None, []),
        "suffix": (None, ""),
    }

    #: Checked by the tokenizer, which knows what the model's template takes.
    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    #: OpenAI's older name of the same.
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    #: vLLM: whether the prompt ends with the opening of the assistant's turn.
    add_generation_prompt: bool = True
    #: vLLM: further arguments of the model's template.
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest('top_logprobs: is only allowed with "logprobs": true.', field="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                "max_tokens: differs from max_completion_tokens; give one of them.", field="max_tokens"
            )
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
