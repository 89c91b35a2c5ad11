"""`remora bench http`: how fast a server answers, Remora or any other that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Literal

import click

from remora.platform.cli.client import base_url, get_json, make_client, url_option
from remora.platform.cli.lengths import Lengths, lengths
from remora.platform.cli.line_plot import line_plot_svg
from remora.platform.cli.load_generator import LoadPlan, LoadResult, percentile, run_load
from remora.platform.cli.number_list import number_list
from remora.platform.cli.orderly_end import ends_in_order
from remora.platform.cli.own_platform import own_platform
from remora.platform.cli.table import print_table

_COLUMNS = {
    "clients": "CLIENTS",
    "requests_per_s": "RATE",
    "requests": "REQUESTS",
    "tokens_per_s": "TOK/S",
    "ttft_p50_s": "TTFT P50 S",
    "ttft_p99_s": "TTFT P99 S",
    "inter_token_p50_ms": "INTER-TOKEN P50 MS",
    "inter_token_p99_ms": "P99 MS",
    "goodput_requests_per_s": "GOODPUT REQ/S",
}


@click.command(name="http")
@url_option
@click.option("-m", "--model", help="Model to load; default: the first one served.")
@click.option(
    "-c", "--clients", callback=number_list, default="1,8,32", show_default=True, help="Numbers of clients, a run each."
)
@click.option("--rates", callback=number_list, help="Instead of clients: requests a second, at random, a run each.")
@click.option(
    "--requests", default=4, show_default=True, type=click.IntRange(min=1), help="Requests a client, or for each 1/s."
)
@click.option(
    "--prompt-tokens", callback=lengths, default="128", show_default=True, help="128, 64-256, or 128~0.5 (log-normal)."
)
@click.option("--output-tokens", callback=lengths, default="64", show_default=True, help="In the same forms.")
@click.option(
    "--max-ttft-s", default=1.0, show_default=True, help="Goodput counts requests whose first token is no later,"
)
@click.option("--max-inter-token-ms", default=100.0, show_default=True, help="and whose mean interval is no longer.")
@click.option("--seed", default=0, show_default=True, help="Of the random prompts, lengths and arrivals.")
@click.option("--start", is_flag=True, help="Start the default platform for the time of the measurement.")
@click.option("--output", type=click.Choice(["table", "jsonl"]), default="table", show_default=True)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write times over the load as SVG.")
def http(
    url: str | None,
    model: str | None,
    clients: list[int],
    rates: list[int] | None,
    requests: int,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    max_ttft_s: float,
    max_inter_token_ms: float,
    seed: int,
    start: bool,
    output: Literal["table", "jsonl"],
    plot: Path | None,
) -> None:
    """Measures tokens per second, time to first token, inter-token time and goodput of streamed completions."""

    def measure(at: str) -> list[LoadResult]:
        with make_client(at) as client:
            name = model or str(get_json(client, "/v1/models")["data"][0]["id"])
        loads = rates or clients
        results = []
        for run, load in enumerate([loads[0], *loads]):
            plan = LoadPlan(
                url=at,
                model=name,
                num_clients=load,
                requests_per_s=float(load) if rates else None,
                num_requests=load * requests,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                # No prompt of one run is cached for another.
                seed=seed * 1000 + run,
            )
            result = asyncio.run(run_load(plan))
            if run > 0:  # the first one warms the server up
                results.append(result)
        return results

    if start:
        with ends_in_order(), own_platform() as started_url:
            results = measure(started_url)
    else:
        results = measure(base_url(url))
    figures = [_figures(result, max_ttft_s, max_inter_token_ms) for result in results]
    plan = results[0].plan
    about = {
        "model": plan.model,
        "url": plan.url,
        "prompt_tokens": str(prompt_tokens),
        "output_tokens": str(output_tokens),
    }
    if plot is not None:
        plot.write_text(_plot(f"{plan.model}: {prompt_tokens} tokens in, {output_tokens} out", bool(rates), figures))
    if output == "jsonl":
        for line in figures:
            click.echo(json.dumps({**about, **line}))
        return
    click.echo(f"{plan.model} at {plan.url}: {prompt_tokens} tokens in, {output_tokens} out")
    shown = [key for key in _COLUMNS if key in figures[0]]
    print_table([_COLUMNS[key] for key in shown], [[line[key] for key in shown] for line in figures])


def _figures(result: LoadResult, max_ttft_s: float, max_inter_token_ms: float) -> dict[str, float]:
    """Rounded for people."""
    rate = result.plan.requests_per_s
    return {
        **({"clients": result.plan.num_clients} if rate is None else {"requests_per_s": rate}),
        "requests": result.plan.num_requests,
        "tokens_per_s": round(result.tokens_per_s, 1),
        "ttft_p50_s": round(percentile(result.ttft_s, 0.5), 3),
        "ttft_p99_s": round(percentile(result.ttft_s, 0.99), 3),
        "inter_token_p50_ms": round(percentile(result.inter_token_s, 0.5) * 1e3, 2),
        "inter_token_p99_ms": round(percentile(result.inter_token_s, 0.99) * 1e3, 2),
        "goodput_requests_per_s": round(result.goodput(max_ttft_s, max_inter_token_ms / 1e3), 3),
    }


def _plot(title: str, over_rates: bool, figures: list[dict[str, float]]) -> str:
    load = "requests_per_s" if over_rates else "clients"
    scales = {"ttft_p50_s": 1e3, "ttft_p99_s": 1e3, "inter_token_p50_ms": 1.0, "inter_token_p99_ms": 1.0}
    names = {
        "ttft_p50_s": "first, p50",
        "ttft_p99_s": "first, p99",
        "inter_token_p50_ms": "between, p50",
        "inter_token_p99_ms": "between, p99",
    }
    lines = {names[key]: [(line[load], line[key] * scale) for line in figures] for key, scale in scales.items()}
    return line_plot_svg(title, "requests a second" if over_rates else "clients", "milliseconds a token", lines)
