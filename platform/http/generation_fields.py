"""The fields that completions and chat completions share, with OpenAI's names and vLLM's additions."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from remora.deployments.engine.messages import Grammar, SamplingParams
from remora.platform.base.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_LOGIT_BIASES = 1024
MAX_CHOICES = 128

#: Fields that mean nothing here and change nothing in the answer.
_IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
#: Fields of OpenAI and vLLM that are not served, and the values with which they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "structured_outputs": (None,),
    "spaces_between_special_tokens": (None, True),
    "return_token_ids": (None, False),
    "best_of": (None, 1),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    #: OpenAI's padding against traffic analysis; loopback and TLS need none, so it is accepted and not done.
    include_obfuscation: bool = False


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = ""
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('"json_schema" belongs to the type "json_schema", and only there.')
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Grammar(kind="json_object")
        return Grammar(kind="json_schema", text=json.dumps(self.json_schema.json_schema))


class GenerationFields(BaseModel):
    """Null means the default, as in OpenAI's API. Every wrong value is refused by the field's name."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    #: Not served here, besides those all generation requests share: name → values that ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: Annotated[str, Field(min_length=1)]
    #: Remora: the namespace whose quota pays; the header X-Remora-Namespace goes first.
    namespace: str | None = None
    #: Remora: the session whose next turn this is; only what is new is sent.
    session_id: Annotated[str, Field(min_length=1)] | None = None
    #: Remora: when another request writes the session: 409 at once, or wait for it.
    on_conflict: Literal["error", "wait"] | None = None
    #: Remora and vLLM: lower goes first.
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    #: 0 and -1: no limit.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: Any) -> Any:
        strings = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
            raise ValueError("must be a string or a list of strings.")
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"holds {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.")
        if any(not 0 < len(each) <= MAX_STOP_CHARS for each in strings):
            raise ValueError(f"every stop string must have 1 to {MAX_STOP_CHARS} characters.")
        return tuple(strings)

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None:
            if len(value) > MAX_LOGIT_BIASES:
                raise ValueError(f"holds {len(value)} tokens; at most {MAX_LOGIT_BIASES} are allowed.")
            wrong = next((key for key in value if not (key.isascii() and key.isdigit())), None)
            if wrong is not None:
                raise ValueError(f"the key {wrong!r} is no token id.")
        return value

    @model_validator(mode="after")
    def _together(self) -> GenerationFields:
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED:
                continue
            neutral = self.neutral.get(name, _NEUTRAL.get(name))
            if neutral is None:
                raise _named(name, "is not a field of this request.")
            if not any(value == each and type(value) is type(each) for each in neutral):
                raise _named(name, "is not served by Remora; leave it out.")
        if self.stream_options is not None and not self.stream:
            raise _named("stream_options", 'is only allowed with "stream": true.')
        if self.session_id is not None and (self.n or 1) > 1:
            raise _named("n", "must be 1 with session_id; fork the session for several answers.")
        if self.on_conflict is not None and self.session_id is None:
            raise _named("on_conflict", "is only allowed with session_id.")
        return self

    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(key), bias) for key, bias in (self.logit_bias or {}).items())

    def sampling(self, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; `max_tokens` and `logprobs` come from fields that differ between the endpoints."""
        neutral = SamplingParams()

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        return SamplingParams(
            temperature=given(self.temperature, neutral.temperature),
            top_p=given(self.top_p, neutral.top_p),
            top_k=max(self.top_k or 0, 0),
            min_p=given(self.min_p, neutral.min_p),
            repetition_penalty=given(self.repetition_penalty, neutral.repetition_penalty),
            presence_penalty=given(self.presence_penalty, neutral.presence_penalty),
            frequency_penalty=given(self.frequency_penalty, neutral.frequency_penalty),
            logit_bias=self.biases(),
            seed=None if self.seed is None else self.seed % 2**63,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids or (),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _named(field: str, message: str) -> InvalidRequest:
    """Raised inside validators, pydantic lets it through as it is."""
    return InvalidRequest(f"{field}: {message}", field=field)
