"""Whether a request can be served at all: what routers miss must not break an engine."""

from __future__ import annotations

from remora.deployments.engine.base import EngineModel
from remora.deployments.engine.context_window import ContextWindow
from remora.deployments.engine.messages import GenerationRequest, SamplingParams
from remora.platform.base.errors import ContextLengthExceeded, InvalidRequest


def check_request(request: GenerationRequest, model: EngineModel) -> int:
    """The most tokens a choice may generate. Raises InvalidRequest or ContextLengthExceeded, naming the field."""
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest("prompt: it has no tokens; send at least one.", field="prompt")
    window = ContextWindow(request.context, max_model_len=model.max_model_len)
    room = window.room(num_prompt)
    if room is not None and room < 1:
        raise ContextLengthExceeded(window.limit_tokens - room + 1, window.limit_tokens, field="prompt")
    sampling = request.sampling
    for field, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        *(("output_token_ids", token_ids) for token_ids in request.output_token_ids),
    ):
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= model.vocab_size):
            wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidRequest(f"{field}: token id {wrong} is outside 0..{model.vocab_size - 1}", field=field)
    if not 1 <= request.num_choices <= 128:
        raise InvalidRequest(f"n: {request.num_choices} is not allowed: from 1 to 128", field="n")
    if request.context is not None and request.num_choices != 1:
        raise InvalidRequest("n: a session continues with one choice; fork it instead", field="n")
    if len(request.output_token_ids) > request.num_choices:
        raise InvalidRequest("output_token_ids: more choices than n", field="output_token_ids")
    _check_sampling(sampling)
    max_tokens = sampling.max_tokens if room is None else min(sampling.max_tokens, room)
    if any(len(token_ids) > max_tokens for token_ids in request.output_token_ids):
        raise InvalidRequest("output_token_ids: more than max_tokens", field="output_token_ids")
    return max_tokens


def _check_sampling(sampling: SamplingParams) -> None:
    for field, value, is_right, allowed in (
        ("temperature", sampling.temperature, 0 <= sampling.temperature <= 100, "from 0 to 100"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0, at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= -1, "-1 or 0 (all), or a count"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty, 0 < sampling.repetition_penalty <= 100, "above 0"),
        ("presence_penalty", sampling.presence_penalty, abs(sampling.presence_penalty) <= 100, "from -2 to 2"),
        ("frequency_penalty", sampling.frequency_penalty, abs(sampling.frequency_penalty) <= 100, "from -2 to 2"),
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        ("min_tokens", sampling.min_tokens, sampling.min_tokens >= 0, "0 or more"),
        ("logprobs", sampling.logprobs, sampling.logprobs is None or 0 <= sampling.logprobs <= 1024, "0 to 1024"),
        ("logit_bias", "", all(abs(bias) <= 1e4 for _, bias in sampling.logit_bias), "biases from -100 to 100"),
    ):
        if not is_right:
            raise InvalidRequest(f"{field}: {value!r} is not allowed: {allowed}", field=field)
