"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from remora.deployments.engine.messages import SamplingParams
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.base import telemetry_names as names
from remora.platform.http.api_types import Completion
from remora.platform.http.body import read_model
from remora.platform.http.choice_writers import TextChoiceWriter
from remora.platform.http.completion_request import CompletionRequest
from remora.platform.http.disconnect import until_disconnect
from remora.platform.http.generation import Generation
from remora.platform.http.generation_answers import answer_chunks, frame_maker, whole_answer
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.openapi import json_body
from remora.platform.http.services import Services, encode
from remora.platform.http.session_prompt import text_prompt
from remora.platform.http.sse import EventStream


def completion_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continues one or several prompts. Choice `i` of prompt `p` has the index `p * n + i`."""
        body = await read_model(request, CompletionRequest, services.config.http.max_body_bytes)
        generation = Generation(services, request, body, names.OPERATION_TEXT_COMPLETION)
        generation.content.asked({"role": "user", "content": prompt} for prompt in body.prompt)
        try:
            async with until_disconnect(request.receive):
                tokenizer = await services.tokenizers.get(generation.model_id)
                turn = await generation.begin_turn()
                added = None if turn is None else await text_prompt(tokenizer, body, turn)
                if turn is None or added is None:
                    prompts = await tokenize_prompts(tokenizer, body)
                else:
                    prompts = [turn.token_ids + added.added]
                await generation.start(
                    prompts,
                    tokenizer,
                    max_tokens=body.max_tokens,
                    default_max_tokens=SamplingParams().max_tokens,
                    logprobs=body.logprobs,
                    field="prompt",
                    added=added,
                    make_frame=frame_maker(Completion, include_usage=body.include_usage) if body.stream else None,
                )
                echoes = _echoes(tokenizer, body, prompts)
                writers = [TextChoiceWriter(index, tokenizer, echo) for index, echo in enumerate(echoes)]
                first = await generation.next_deltas()
                answer = None if body.stream else await whole_answer(Completion, generation, first, writers)
        except BaseException as error:
            generation.finish(error)
            raise
        if answer is None:
            chunks = answer_chunks(Completion, generation, first, writers, include_usage=body.include_usage)
            return EventStream(chunks, on_end=generation.finish, headers=generation.headers())
        generation.finish()
        return MsgspecJSONResponse(answer, headers=generation.headers())

    return router


async def tokenize_prompts(tokenizer: ChatTokenizer, body: CompletionRequest) -> list[tuple[int, ...]]:
    """Token ids of every prompt. Raises InvalidRequest for ids that the model does not have."""
    prompts: list[tuple[int, ...]] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            prompts.append(await encode(tokenizer, prompt, add_special_tokens=True, field="prompt"))
        else:
            tokenizer.check_ids(prompt, field="prompt")
            prompts.append(prompt)
    return prompts


def _echoes(tokenizer: ChatTokenizer, body: CompletionRequest, prompts: list[tuple[int, ...]]) -> list[str]:
    """Per choice, the text to put before its output: the prompt with `echo`, else nothing."""
    if not body.echo:
        return [""] * (len(prompts) * (body.n or 1))
    texts = [
        prompt if isinstance(prompt, str) else tokenizer.decode(token_ids, field="prompt")
        for prompt, token_ids in zip(body.prompt, prompts, strict=True)
    ]
    return [text for text in texts for _ in range(body.n or 1)]
