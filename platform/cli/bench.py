"""`remora bench`: how fast a server answers, Remora or any other that speaks OpenAI's API; or an engine alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from remora.platform.base.errors import RemoraError
from remora.platform.cli.bench_batch import batch
from remora.platform.cli.client import base_url, get_json, make_client, url_option
from remora.platform.cli.instance import InstanceStore
from remora.platform.cli.load_generator import LoadPlan, LoadResult, percentile, run_load
from remora.platform.cli.number_list import number_list
from remora.platform.cli.table import print_table

_START_TIMEOUT_S = 600.0
_NAME = "bench"


@click.group(invoke_without_command=True)
@click.pass_context
@url_option
@click.option("-m", "--model", help="Model to load; default: the first one served.")
@click.option(
    "-c", "--clients", callback=number_list, default="1,8,32", show_default=True, help="Numbers of clients, a run each."
)
@click.option("--requests", default=4, show_default=True, type=click.IntRange(min=1), help="Requests a client.")
@click.option("--prompt-tokens", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, help="Of the random prompts.")
@click.option("--start", is_flag=True, help="Start the default platform for the time of the measurement.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each run instead of a table.")
def bench(
    context: click.Context,
    url: str | None,
    model: str | None,
    clients: list[int],
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    seed: int,
    start: bool,
    as_json: bool,
) -> None:
    """Measures tokens per second, time to first token and inter-token time over HTTP."""
    if context.invoked_subcommand is not None:
        return
    if start:
        with _platform() as started_url:
            results = _measure(started_url, model, clients, requests, prompt_tokens, output_tokens, seed)
    else:
        results = _measure(base_url(url), model, clients, requests, prompt_tokens, output_tokens, seed)
    if as_json:
        for result in results:
            click.echo(json.dumps(summary(result)))
        return
    click.echo(f"{results[0].plan.model} at {results[0].plan.url}: {prompt_tokens} tokens in, {output_tokens} out")
    print_table(
        ["CLIENTS", "REQUESTS", "TOK/S", "TTFT P50 S", "TTFT P99 S", "INTER-TOKEN P50 MS", "P99 MS"],
        [list(summary(result)["figures"].values()) for result in results],
    )


bench.add_command(batch)


def summary(result: LoadResult) -> dict[str, dict[str, float]]:
    """The plan and the figures of a run, rounded for people."""
    return {
        "plan": asdict(result.plan),
        "figures": {
            "clients": result.plan.num_clients,
            "requests": result.plan.num_requests,
            "tokens_per_s": round(result.tokens_per_s, 1),
            "ttft_p50_s": round(percentile(result.ttft_s, 0.5), 3),
            "ttft_p99_s": round(percentile(result.ttft_s, 0.99), 3),
            "inter_token_p50_ms": round(percentile(result.inter_token_s, 0.5) * 1e3, 2),
            "inter_token_p99_ms": round(percentile(result.inter_token_s, 0.99) * 1e3, 2),
        },
    }


def _measure(
    url: str, model: str | None, clients: list[int], requests: int, prompt_tokens: int, output_tokens: int, seed: int
) -> list[LoadResult]:
    with make_client(url) as client:
        model = model or str(get_json(client, "/v1/models")["data"][0]["id"])
    results = []
    for run, num_clients in enumerate([clients[0], *clients]):
        plan = LoadPlan(
            url=url,
            model=model,
            num_clients=num_clients,
            num_requests=num_clients * requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            # No prompt of one run is cached for another.
            seed=seed * 1000 + run,
        )
        result = asyncio.run(run_load(plan))
        if run > 0:  # the first one warms the server up
            results.append(result)
    return results


@contextmanager
def _platform() -> Iterator[str]:
    """A platform of its own for the time of the measurement; yields its URL."""
    with tempfile.TemporaryDirectory(prefix="remora-bench-") as state_dir:
        environment = {**os.environ, "REMORA_STATE_DIR": state_dir}
        process = subprocess.Popen(
            [sys.executable, "-m", "remora.platform.cli.main", "up", "--port", "0", "--name", _NAME],
            env=environment,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _await_url(process, Path(state_dir))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)


def _await_url(process: subprocess.Popen[bytes], state_dir: Path) -> str:
    store = InstanceStore(state_dir, _NAME)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        record = store.read()
        if record is not None and record.status == "ready":
            return record.url
        time.sleep(0.2)
    raise RemoraError("the platform did not start; its messages are above")
