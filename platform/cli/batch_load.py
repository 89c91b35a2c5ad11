"""Batches on an engine in this process, without Ray and HTTP: the cases of llama.cpp's llama-batched-bench."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remora.cache_actors.local_pool import LocalPool
from remora.cache_actors.port import OpenGate
from remora.deployments.engine.base import EngineConfig, EngineNamespace
from remora.deployments.engine.engine import Engine
from remora.deployments.engine.messages import GenerationRequest, SamplingParams, TokenDelta
from remora.deployments.models.load import LoadedModel
from remora.namespaces.hashing import chain_hashes, chain_root, sharing_domain
from remora.platform.base.clock import SystemClock
from remora.platform.base.errors import RemoraError
from remora.platform.base.ids import ModelId, NamespaceId, RequestId, RouterId

_NAMESPACE = NamespaceId("bench")
#: A step that computes nothing for so long means that the batch cannot go on.
_STALL_S = 60.0


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
        #: Of the first sequence that ended early.
        self.failure: str | None = None
        self._begun: set[RequestId] = set()

    def add(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.token_ids:
                self._begun.add(delta.request_id)
                self.num_tokens += len(delta.token_ids)
            if delta.finish_reason in ("error", "abort"):
                self.failure = self.failure or (
                    f"{delta.request_id} ended early: {delta.error_message or delta.finish_reason}"
                )
            self.num_ended += delta.finish_reason is not None
        self.num_begun = len(self._begun)


def run_batch(model: LoadedModel, case: BatchCase, *, max_step_tokens: int = 2048, seed: int = 0) -> BatchTimes:
    """Greedy, end of text ignored, random prompts. Raises RemoraError when the engine ends a sequence early."""
    geometry, block_tokens = model.geometry, model.geometry.block_tokens
    per_sequence = -(-(case.prompt_tokens + case.own_tokens + case.output_tokens + 1) // block_tokens) + 2
    pool = LocalPool.alone(
        geometry,
        num_blocks=max(16, per_sequence * (case.num_sequences + 1)),
        namespaces={_NAMESPACE: None},
        fingerprint=model.fingerprint,
    )
    root = chain_root(model.fingerprint, sharing_domain(_NAMESPACE, "", ""))
    tally = _Tally()
    engine = Engine(
        model,
        pool.memory,
        pool,
        OpenGate(),
        SystemClock(),
        lambda _router_id, deltas: tally.add(deltas),
        find_namespace=lambda _: EngineNamespace(root=root),
        config=EngineConfig(max_num_seqs=case.num_sequences, max_step_tokens=max_step_tokens),
    )
    draw = random.Random(seed)

    def prompt(num_tokens: int) -> tuple[int, ...]:
        return tuple(draw.randrange(16, model.vocab_size) for _ in range(num_tokens))

    def submit(name: str, token_ids: tuple[int, ...], max_tokens: int) -> None:
        engine.submit(
            GenerationRequest(
                request_id=RequestId(name),
                router_id=RouterId("bench"),
                model_id=ModelId(model.name),
                namespace_id=_NAMESPACE,
                prompt_token_ids=token_ids,
                block_hashes=tuple(chain_hashes(root, token_ids, block_tokens)),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            )
        )

    def step_until(count: Callable[[], int], wanted: int) -> float:
        """Steps until so many sequences have begun or ended; the time of the last step's end."""
        last_s = time.perf_counter()
        while count() < wanted:
            before = tally.num_tokens
            engine.step()
            now_s = time.perf_counter()
            if tally.failure is not None:
                raise RemoraError(tally.failure)
            if tally.num_tokens > before:
                last_s = now_s
            elif now_s - last_s > _STALL_S:
                raise RemoraError(f"the engine computes nothing: {engine.stats()}")
        return time.perf_counter()

    try:
        started_s, common = time.perf_counter(), prompt(case.prompt_tokens)
        num_submitted, shared_s = case.num_sequences, 0.0
        if case.shared_prompt:
            submit("prompt", common, 1)
            shared_s = step_until(lambda: tally.num_ended, 1) - started_s
            num_submitted += 1
        for index in range(case.num_sequences):
            own = common + prompt(case.own_tokens) if case.shared_prompt else prompt(case.prompt_tokens)
            submit(f"r{index}", own, case.output_tokens)
        begun_s = step_until(lambda: tally.num_begun, num_submitted)
        num_early = tally.num_tokens
        ended_s = step_until(lambda: tally.num_ended, num_submitted)
        num_late = tally.num_tokens - num_early
    finally:
        engine.stop()
    return BatchTimes(
        prompt_s=begun_s - started_s, shared_s=shared_s, output_s=ended_s - begun_s, output_tokens=num_late
    )
