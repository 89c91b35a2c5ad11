"""A request while it lives in the engine: what its choices share."""

from __future__ import annotations

import time

from remora.deployments.engine.base import EngineModel, EngineNamespace
from remora.deployments.engine.context_window import ContextWindow
from remora.deployments.engine.draws import seed_of_request
from remora.deployments.engine.messages import GenerationRequest
from remora.deployments.engine.output import OutputText
from remora.deployments.engine.sequence import Sequence
from remora.kernels.base import KVMemory
from remora.kernels.mover import prepare_moves


class LiveRequest:
    """A request and its choices. One computes the prompt; the others wait for its blocks."""

    def __init__(self, request: GenerationRequest, namespace: EngineNamespace, memory: KVMemory, now_s: float) -> None:
        """`memory`: where its KV lies as long as it lives, unless the namespace has a precision of its own."""
        self.request = request
        self.namespace = namespace
        self.memory = namespace.memory or memory
        self.sequences: list[Sequence] = []
        self.submitted_s = now_s
        self.submitted_unix_ns = time.time_ns()
        self.deadline_s = now_s + request.queue_timeout_s
        #: The choice that computes the prompt.
        self.lead: Sequence | None = None
        #: Prompt tokens that the lead found in the cache. Set when it is admitted for the first time: from then on
        #: there is no deadline.
        self.num_cached_tokens: int | None = None
        #: Tokens whose blocks the lead got from another pool.
        self.num_copied_tokens = 0
        #: Tokens whose blocks it got by conversion from another precision.
        self.num_converted_tokens = 0
        #: A pool was asked for blocks that it may have: that is done once.
        self.has_asked_source = False

    @property
    def has_started(self) -> bool:
        return self.num_cached_tokens is not None


def make_sequences(live: LiveRequest, model: EngineModel, *, max_tokens: int, block_tokens: int) -> list[Sequence]:
    """One sequence for each choice of a checked request."""
    request = live.request
    sampling = request.sampling
    # A configuration may name ends that the model has no logits for.
    eos_token_ids = tuple(token_id for token_id in model.eos_token_ids if token_id < model.vocab_size)
    window = ContextWindow(request.context, max_model_len=model.max_model_len)
    if window.next_removal is not None:
        prepare_moves()
    seed = sampling.seed if sampling.seed is not None else seed_of_request(request.request_id)
    return [
        Sequence(
            live,
            choice_index,
            output=OutputText(
                model.tokenizer.detokenizer(request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens),
                sampling,
                eos_token_ids=eos_token_ids,
                max_tokens=max_tokens,
            ),
            eos_token_ids=eos_token_ids,
            seed=seed,
            max_tokens=max_tokens,
            block_tokens=block_tokens,
            window=ContextWindow(request.context, max_model_len=model.max_model_len),
        )
        for choice_index in range(request.num_choices)
    ]
