"""`remora trace`: the traces that the processes of this machine have written."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import click

from remora.platform.base.errors import NotFound
from remora.platform.base.paths import default_state_dir
from remora.platform.base.span_file import StoredSpan, read_spans, traces_dir
from remora.platform.cli.table import print_table

state_dir_option = click.option(
    "--state-dir", type=click.Path(path_type=Path), help="cluster.state_dir of the instance."
)


@click.group()
def trace() -> None:
    """Traces of requests, from the files in the state directory."""


@trace.command(name="list")
@state_dir_option
@click.option("-n", "--last", default=20, show_default=True, help="How many, newest last.")
def list_traces(state_dir: Path | None, last: int) -> None:
    """The last traces: when, how long, which root span, how many spans."""
    traces = read_traces(state_dir or default_state_dir())
    newest = sorted(traces.items(), key=lambda item: item[1][0].start_ns)[-last:]
    print_table(
        ["TRACE", "STARTED", "MS", "SPANS", "ERRORS", "ROOT"],
        [
            [
                trace_id,
                datetime.fromtimestamp(spans[0].start_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S"),
                round((max(span.end_ns for span in spans) - spans[0].start_ns) / 1e6, 1),
                len(spans),
                sum(1 for span in spans if span.error_type),
                spans[0].name,
            ]
            for trace_id, spans in newest
        ],
    )


@trace.command()
@click.argument("trace_id")
@state_dir_option
def show(trace_id: str, state_dir: Path | None) -> None:
    """One trace as a tree with times; TRACE_ID may be shortened to any unique beginning."""
    traces = read_traces(state_dir or default_state_dir())
    matching = [each for each in traces if each.startswith(trace_id)]
    if len(matching) != 1:
        what = "no trace begins" if not matching else f"{len(matching)} traces begin"
        raise NotFound(f"{what} with {trace_id!r}; see `remora trace list`")
    for line in tree_lines(traces[matching[0]]):
        click.echo(line)


def read_traces(state_dir: Path) -> dict[str, list[StoredSpan]]:
    """Trace id → its spans by start time."""
    traces: dict[str, list[StoredSpan]] = defaultdict(list)
    for span in read_spans(traces_dir(state_dir)):
        traces[span.trace_id].append(span)
    for spans in traces.values():
        spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
    return dict(traces)


def tree_lines(spans: list[StoredSpan]) -> list[str]:
    """The spans of one trace, children below their parents, with the start after the trace's and the duration."""
    known = {span.span_id for span in spans}
    children: dict[str, list[StoredSpan]] = defaultdict(list)
    for span in spans:
        # The caller's own span, or one that is not written yet, is not in the files: its children are roots here.
        children[span.parent_span_id if span.parent_span_id in known else ""].append(span)
    lines: list[str] = []

    def add(span: StoredSpan, depth: int) -> None:
        start_ms = (span.start_ns - spans[0].start_ns) / 1e6
        attributes = " ".join(f"{key}={value}" for key, value in span.attributes.items())
        error = f" FAILED {span.error_type}: {span.error}" if span.error_type else ""
        lines.append(
            f"{start_ms:9.1f} ms {span.duration_s * 1e3:9.1f} ms  {'  ' * depth}{span.name}  [{span.process}]"
            f"{error}{'  ' + attributes if attributes else ''}"
        )
        for child in children[span.span_id]:
            add(child, depth + 1)

    for root in children[""]:
        add(root, 0)
    return lines
