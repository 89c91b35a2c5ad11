"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.base import telemetry_names as names
from remora.platform.http.api_types import ChatCompletion, ChatCompletionChunk
from remora.platform.http.body import read_model
from remora.platform.http.chat_request import ChatRequest
from remora.platform.http.choice_writers import ChatChoiceWriter
from remora.platform.http.disconnect import until_disconnect
from remora.platform.http.generation import Generation
from remora.platform.http.generation_answers import answer_chunks, frame_maker, whole_answer
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.openapi import json_body
from remora.platform.http.services import Services
from remora.platform.http.session_prompt import chat_prompt, rendered_behind
from remora.platform.http.sse import EventStream


def chat_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """The model's answer to a conversation."""
        body = await read_model(request, ChatRequest, services.config.http.max_body_bytes)
        generation = Generation(services, request, body, names.OPERATION_CHAT)
        generation.content.asked(body.messages)
        try:
            async with until_disconnect(request.receive):
                tokenizer = await services.tokenizers.get(generation.model_id)
                turn = await generation.begin_turn()
                added = None if turn is None else await chat_prompt(tokenizer, body, turn)
                if turn is None or added is None:
                    prompt = await render_prompt(tokenizer, body)
                else:
                    prompt = turn.token_ids + added.added
                await generation.start(
                    [prompt],
                    tokenizer,
                    max_tokens=body.output_limit,
                    default_max_tokens=None,
                    logprobs=body.num_logprobs,
                    field="messages",
                    added=added,
                    make_frame=frame_maker(ChatCompletionChunk, include_usage=body.include_usage)
                    if body.stream
                    else None,
                )
                writers = [ChatChoiceWriter(index, tokenizer) for index in range(generation.num_choices)]
                first = await generation.next_deltas()
                answer = None if body.stream else await whole_answer(ChatCompletion, generation, first, writers)
        except BaseException as error:
            generation.finish(error)
            raise
        if answer is None:
            chunks = answer_chunks(ChatCompletionChunk, generation, first, writers, include_usage=body.include_usage)
            return EventStream(chunks, on_end=generation.finish, headers=generation.headers())
        generation.finish()
        return MsgspecJSONResponse(answer, headers=generation.headers())

    return router


async def render_prompt(tokenizer: ChatTokenizer, body: ChatRequest) -> tuple[int, ...]:
    """Token ids of the conversation under the model's template. Raises InvalidRequest naming the message."""
    return await rendered_behind(
        tokenizer,
        body.messages,
        (),
        add_generation_prompt=body.add_generation_prompt,
        arguments=body.chat_template_kwargs,
    )
