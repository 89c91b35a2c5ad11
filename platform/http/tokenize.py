"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from remora.platform.base.errors import InvalidRequest
from remora.platform.http.body import read_model
from remora.platform.http.caller import caller_of
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.openapi import json_body
from remora.platform.http.services import Services, encode


class TokenizeRequest(BaseModel):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: give either a prompt or messages.", field="prompt")
        return self


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1)]
    tokens: list[int]


def tokenize_routes(services: Services) -> APIRouter:
    router = APIRouter()
    limit = services.config.http.max_body_bytes

    @router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a conversation under the model's template."""
        body = await read_model(request, TokenizeRequest, limit)
        model_id = caller_of(request).find_model(services.core.catalog, body.model)
        tokenizer = await services.tokenizers.get(model_id)
        if body.messages is not None:
            text = tokenizer.render(
                body.messages,
                None,
                add_generation_prompt=body.add_generation_prompt,
                arguments=body.chat_template_kwargs,
            )
            field, special = "messages", bool(body.add_special_tokens)
        else:
            text = body.prompt or ""
            field, special = "prompt", body.add_special_tokens is not False
        tokens = await encode(tokenizer, text, add_special_tokens=special, field=field)
        card = await services.core.fleet.card(model_id)
        answer = {"count": len(tokens), "max_model_len": card.max_model_len, "tokens": tokens, "token_strs": None}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in tokens]
        return MsgspecJSONResponse(answer)

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await read_model(request, DetokenizeRequest, limit)
        tokenizer = await services.tokenizers.get(caller_of(request).find_model(services.core.catalog, body.model))
        text = tokenizer.decode(body.tokens, skip_special_tokens=False, field="tokens")
        return MsgspecJSONResponse({"prompt": text})

    return router
