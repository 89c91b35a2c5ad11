"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from remora.platform.base.errors import InvalidRequest
from remora.platform.http.generation_fields import MAX_CHOICES, GenerationFields

MAX_LOGPROBS = 20

Prompt = str | tuple[int, ...]


class CompletionRequest(GenerationFields):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": (None, "")}

    #: Text, token ids, or a list of either: always a tuple of prompts after validation.
    prompt: tuple[Prompt, ...]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    #: Alternatives a token.
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if not isinstance(prompts, list) or not prompts:
            raise ValueError("must be a string, a list of token ids, or a list of either, and not be empty.")
        for prompt in prompts:
            if not isinstance(prompt, str) and not _is_token_ids(prompt):
                raise ValueError("a prompt in the list must be a string or a non-empty list of token ids.")
        return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)

    @model_validator(mode="after")
    def _served(self) -> CompletionRequest:
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt: {len(self.prompt)} prompts with n={self.n or 1} make {len(self.prompt) * (self.n or 1)} "
                f"choices; at most {MAX_CHOICES} are allowed.",
                field="prompt",
            )
        if self.session_id is not None and len(self.prompt) > 1:
            raise InvalidRequest("prompt: must be a single prompt with session_id.", field="prompt")
        if self.session_id is not None and self.echo:
            raise InvalidRequest("echo: is not served together with session_id.", field="echo")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo: is not served together with logprobs.", field="echo")
        return self


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(each) is int for each in value)
