"""What an engine step costs besides the forward pass: Python, sampling, deltas, the pool's protocol.

    python tests/bench/bench_engine_overhead.py [--sequences 32] [--vocab 49152] [--tokens 200]

The decoder is fake: it returns random logits at once. Figures are medians over the decoding steps of one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.local_pool import LocalPool
from remora.cache_actors.port import OpenGate
from remora.deployments.engine.base import EngineConfig, EngineNamespace
from remora.deployments.engine.engine import Engine
from remora.deployments.engine.messages import GenerationRequest, SamplingParams, TokenDelta
from remora.deployments.models.detokenizer import IncrementalDetokenizer
from remora.kernels.base import KVMemory
from remora.kernels.batch import StepBatch
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.hashing import chain_hashes, chain_root, sharing_domain
from remora.platform.base.clock import SystemClock
from remora.platform.base.ids import BlockHash, ModelId, NamespaceId, RequestId, RouterId

GEOMETRY = KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=32)
NAMESPACE = NamespaceId("bench")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, stop string": {"temperature": 0.0, "stop": ("\n\nUser:",)},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "temperature": {"temperature": 0.8},
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},
    "temperature, top_k": {"temperature": 0.8, "top_k": 40},
    "temperature, penalties": {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1},
}


class RandomLogits:
    """A decoder that takes no time: logits with the spread of a small language model's."""

    name = "random"
    batch_invariant = True

    def __init__(self, vocab_size: int, num_rows: int) -> None:
        rng = np.random.default_rng(0)
        self._logits_RV: NDArray[np.float32] = rng.gumbel(0, 2.5, (num_rows, vocab_size)).astype(np.float32)

    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        return self._logits_RV[: batch.num_logit_rows]


class Letters:
    """Pieces of a tokenizer: every token is a short word."""

    strips_first_space = False
    special_ids: frozenset[int] = frozenset()

    def __getitem__(self, token_id: int) -> bytes:
        return b" word"


class LettersTokenizer:
    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(Letters(), prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def grammar_tokenizer(self, num_logits: int) -> Any:
        raise NotImplementedError("the bench uses no grammar")


@dataclass
class BenchModel:
    decoder: RandomLogits
    vocab_size: int
    tokenizer: LettersTokenizer
    name: str = "bench"
    max_model_len: int = 4096
    rope_inv_freq: None = None
    eos_token_ids: tuple[int, ...] = (0,)


def measure(sampling: dict[str, Any], *, num_sequences: int, vocab_size: int, num_tokens: int) -> dict[str, float]:
    """Median and 99th percentile of decoding steps, in milliseconds."""
    root: BlockHash = chain_root(b"bench", sharing_domain(NAMESPACE, "", ""))
    pool = LocalPool.alone(GEOMETRY, num_blocks=num_sequences * 40, namespaces={NAMESPACE: None}, fingerprint=b"bench")
    deltas: list[TokenDelta] = []
    engine = Engine(
        BenchModel(RandomLogits(vocab_size, num_sequences), vocab_size, LettersTokenizer()),
        pool.memory,
        pool,
        OpenGate(),
        SystemClock(),
        lambda router_id, new: deltas.extend(new),
        find_namespace=lambda namespace_id: EngineNamespace(root=root),
        config=EngineConfig(max_num_seqs=num_sequences, max_step_tokens=8192),
    )
    rng = np.random.default_rng(1)
    for i in range(num_sequences):
        prompt = rng.integers(1, vocab_size, 128).tolist()
        engine.submit(
            GenerationRequest(
                request_id=RequestId(f"r{i}"),
                router_id=RouterId("router"),
                model_id=ModelId("model"),
                namespace_id=NAMESPACE,
                prompt_token_ids=tuple(prompt),
                block_hashes=tuple(chain_hashes(root, prompt, GEOMETRY.block_tokens)),
                sampling=SamplingParams(**{"max_tokens": num_tokens, "ignore_eos": True, **sampling}),
            )
        )
    engine.step()
    times_s = []
    while engine.stats().num_running == num_sequences:
        started_s = time.perf_counter()
        engine.step()
        times_s.append(time.perf_counter() - started_s)
    engine.stop()
    assert len(deltas) == num_sequences * num_tokens
    times_s.sort()
    return {"median_ms": statistics.median(times_s) * 1e3, "p99_ms": times_s[len(times_s) * 99 // 100] * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    print(f"{options.sequences} sequences, vocabulary of {options.vocab}, {options.tokens} tokens each")
    for name, sampling in SAMPLINGS.items():
        figures = measure(
            sampling, num_sequences=options.sequences, vocab_size=options.vocab, num_tokens=options.tokens
        )
        print(f"{name:24s} median {figures['median_ms']:7.3f} ms   p99 {figures['p99_ms']:7.3f} ms")


if __name__ == "__main__":
    main()
