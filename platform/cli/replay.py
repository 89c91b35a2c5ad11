"""`remora replay`: hit rates of eviction policies on a recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from remora.namespaces.eviction import POLICY_NAMES
from remora.namespaces.replay import OPTIMUM, ReplayResult, check_policy, parse_capacity
from remora.namespaces.replay import replay as replay_trace
from remora.namespaces.trace import count_unique_blocks, read_trace
from remora.platform.cli.line_plot import line_plot_svg
from remora.platform.cli.table import print_table


@click.command()
@click.option(
    "--trace", "trace_path", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines in the format of the Mooncake traces.",
)  # fmt: skip
@click.option(
    "--policy", "policies", default=",".join(POLICY_NAMES), show_default=True, help="Policies, separated by commas."
)
@click.option(
    "--capacity", "capacities", default="1%,3%,10%,30%", show_default=True,
    help="Blocks, or shares of the trace's unique blocks, separated by commas.",
)  # fmt: skip
@click.option("--optimum/--no-optimum", default=True, help="Also replay the optimum, which knows the future (Belady).")
@click.option(
    "--jsonl", "jsonl_path", type=click.Path(dir_okay=False, path_type=Path),
    help="Write one line for each policy and capacity here.",
)  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot (SVG) here.")
def replay(
    trace_path: Path, policies: str, capacities: str, optimum: bool, jsonl_path: Path | None, plot_path: Path | None
) -> None:
    """Replays a trace with the pool's own policies and prints the hit rates in percent."""
    names = _split(policies)
    for name in names:
        check_policy(name)
    if optimum and OPTIMUM not in names:
        names.append(OPTIMUM)
    with trace_path.open("rb") as lines:
        trace = read_trace(lines)
    unique = count_unique_blocks(trace)
    columns = {text: parse_capacity(text, unique) for text in _split(capacities)}
    click.echo(f"{len(trace)} requests, {unique} unique blocks; hit rates in percent")
    rows: list[list[object]] = []
    results: list[ReplayResult] = []
    for name in names:
        found = [replay_trace(trace, name, blocks) for blocks in columns.values()]
        rows.append([name, *(_percent(result) for result in found)])
        results += found
    print_table(["POLICY", *(f"{text} ({blocks})" for text, blocks in columns.items())], rows)
    if jsonl_path is not None:
        lines_of = [msgspec.json.encode({"trace": trace_path.name, **_record(result)}) for result in results]
        jsonl_path.write_bytes(b"".join(line + b"\n" for line in lines_of))
    if plot_path is not None:
        plot_path.write_text(_plot(trace_path.name, results), encoding="utf-8")


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _percent(result: ReplayResult) -> str:
    return f"{100 * result.hit_rate:.2f}"


def _record(result: ReplayResult) -> dict[str, object]:
    return {**msgspec.to_builtins(result, str_keys=True), "hit_rate": round(result.hit_rate, 6)}


def _plot(trace_name: str, results: Sequence[ReplayResult]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        lines.setdefault(result.policy, []).append((float(result.capacity_blocks), 100 * result.hit_rate))
    return line_plot_svg(trace_name, "capacity in blocks", "hit rate in percent", lines)
