"""Batches on an engine in this process, without Ray and HTTP: the cases of llama.cpp's llama-batched-bench."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remora.deployments.engine.messages import TokenDelta
from remora.deployments.models.loaded_model import LoadedModel
from remora.platform.base.ids import RequestId
from remora.platform.cli.lone_engine import LoneEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCase:
    """One line of the table."""

    prompt_tokens: int
    output_tokens: int
    num_sequences: int
    #: All sequences have the same prompt: it is computed once.
    shared_prompt: bool = False
    #: Tokens of its own that each sequence has behind a shared prompt.
    own_tokens: int = 0

    @property
    def num_kv_tokens(self) -> int:
        """Tokens in the cache at the end."""
        prompts = self.prompt_tokens * (1 if self.shared_prompt else self.num_sequences)
        return prompts + (self.own_tokens + self.output_tokens) * self.num_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """`prompt_s` is the time until every sequence has its first token, `shared_s` that of the shared prompt, which is
    part of it; `output_s` is the rest."""

    prompt_s: float
    shared_s: float
    output_s: float
    #: Tokens that came in the second part; sequences that were ready earlier have begun in the first.
    output_tokens: int


class _Tally:
    """Counts what the engine says."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_ended = 0
        self.num_tokens = 0
        self._begun: set[RequestId] = set()

    def add(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.token_ids:
                self._begun.add(delta.request_id)
                self.num_tokens += len(delta.token_ids)
            self.num_ended += delta.finish_reason is not None
        self.num_begun = len(self._begun)


def run_batch(model: LoadedModel, case: BatchCase, *, max_step_tokens: int = 2048, seed: int = 0) -> BatchTimes:
    """Greedy, end of text ignored, random prompts. Raises RemoraError when the engine ends a sequence early."""
    block_tokens = model.geometry.block_tokens
    per_sequence = -(-(case.prompt_tokens + case.own_tokens + case.output_tokens + 1) // block_tokens) + 2
    tally = _Tally()
    engine = LoneEngine(
        model,
        num_blocks=max(16, per_sequence * (case.num_sequences + 1)),
        max_num_seqs=case.num_sequences,
        max_step_tokens=max_step_tokens,
        on_deltas=tally.add,
    )
    draw = random.Random(seed)

    def prompt(num_tokens: int) -> tuple[int, ...]:
        return tuple(draw.randrange(16, model.vocab_size) for _ in range(num_tokens))

    def step_until(count: Callable[[], int], wanted: int) -> float:
        """Steps until so many sequences have begun or ended; the time of the last step's end."""
        while count() < wanted:
            engine.step()
        return time.perf_counter()

    try:
        started_s, common = time.perf_counter(), prompt(case.prompt_tokens)
        num_submitted, shared_s = case.num_sequences, 0.0
        if case.shared_prompt:
            engine.submit("prompt", common, 1)
            shared_s = step_until(lambda: tally.num_ended, 1) - started_s
            num_submitted += 1
        for index in range(case.num_sequences):
            own = common + prompt(case.own_tokens) if case.shared_prompt else prompt(case.prompt_tokens)
            engine.submit(f"r{index}", own, case.output_tokens)
        begun_s = step_until(lambda: tally.num_begun, num_submitted)
        num_early = tally.num_tokens
        ended_s = step_until(lambda: tally.num_ended, num_submitted)
        num_late = tally.num_tokens - num_early
    finally:
        engine.close()
    return BatchTimes(
        prompt_s=begun_s - started_s, shared_s=shared_s, output_s=ended_s - begun_s, output_tokens=num_late
    )
