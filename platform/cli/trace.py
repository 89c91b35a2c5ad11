"""`remora trace`: the traces of requests, from the files on this machine, or from a platform elsewhere."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx

from remora.platform.base.errors import NotFound
from remora.platform.base.paths import default_state_dir
from remora.platform.base.span_file import StoredSpan, traces_dir
from remora.platform.base.trace_store import TraceQuery, TraceStore, TraceSummary
from remora.platform.cli.client import get_json, make_client
from remora.platform.cli.table import print_table

state_dir_option = click.option(
    "--state-dir", type=click.Path(path_type=Path), help="cluster.state_dir of the instance."
)
trace_url_option = click.option("--url", envvar="REMORA_URL", help="Ask the platform there instead.")
_MIN_BAR_CHARS = 20
_MAX_BAR_CHARS = 60


@click.group()
def trace() -> None:
    """Traces of requests, from the files in the state directory, also when nothing runs; with --url from there."""


@trace.command(name="list")
@state_dir_option
@trace_url_option
@click.option("-n", "--last", default=20, show_default=True, help="How many, newest last.")
@click.option("--namespace", help="Only of this namespace.")
@click.option("--session", help="Only of this session.")
@click.option("--min-ms", default=0.0, help="Only those that took at least so many milliseconds.")
@click.option("--failed", is_flag=True, help="Only those with an error in them.")
def list_traces(
    state_dir: Path | None,
    url: str | None,
    last: int,
    namespace: str | None,
    session: str | None,
    min_ms: float,
    failed: bool,
) -> None:
    """The last traces: when, how long, whose, and what they cost."""
    if url is not None:
        query = {"namespace": namespace, "session": session, "min_ms": min_ms, "failed": failed, "limit": last}
        found = _ask_for_summaries(url, {name: value for name, value in query.items() if value})
    else:
        found = _store(state_dir).search(
            TraceQuery(
                namespaces=None if namespace is None else frozenset({namespace}),
                session=session,
                min_ms=min_ms,
                failed=failed,
                limit=last,
            )
        )
    print_table(
        ["TRACE", "STARTED", "NAMESPACE", "SESSION", "IN", "CACHED", "OUT", "MS", "NAME", "ERROR"],
        [
            [
                each.trace_id,
                datetime.fromtimestamp(each.start_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S"),
                each.namespace or "-",
                each.session or "-",
                each.input_tokens,
                each.cached_tokens,
                each.output_tokens,
                round(each.duration_ms, 1),
                each.name,
                each.error_type,
            ]
            for each in reversed(found)
        ],
    )


@trace.command()
@click.argument("trace_id")
@state_dir_option
@trace_url_option
@click.option("-a", "--attributes", is_flag=True, help="Show the attributes of each span.")
def show(trace_id: str, state_dir: Path | None, url: str | None, attributes: bool) -> None:
    """One trace as a waterfall; without --url TRACE_ID may be shortened to any unique beginning."""
    spans = _find_spans(_store(state_dir), trace_id) if url is None else _ask_for_spans(url, trace_id)
    width = shutil.get_terminal_size((120, 24)).columns
    for line in waterfall_lines(spans, width, attributes=attributes):
        click.echo(line)


def _find_spans(store: TraceStore, beginning: str) -> list[StoredSpan]:
    matching = store.find(beginning)
    if len(matching) != 1:
        what = "no trace begins" if not matching else f"{len(matching)} traces begin"
        raise NotFound(f"{what} with {beginning!r}; see `remora trace list`")
    return store.spans(matching[0])


def _ask_for_summaries(url: str, query: dict[str, Any]) -> list[TraceSummary]:
    with make_client(url) as client:
        answer = get_json(client, f"/v1/traces?{httpx.QueryParams(query)}")
    _say_who_is_silent(answer)
    return [
        TraceSummary(
            trace_id=each["id"],
            namespace=each["namespace"],
            session=each["session"] or "",
            name=each["name"],
            start_ns=round(each["started"] * 1e9),
            end_ns=round((each["started"] + each["duration_ms"] / 1e3) * 1e9),
            num_spans=each["num_spans"],
            num_errors=each["num_errors"],
            complete=each["complete"],
            error_type=each["error_type"] or "",
            error=each["error"] or "",
            input_tokens=each["input_tokens"],
            cached_tokens=each["cached_tokens"],
            output_tokens=each["output_tokens"],
            replicas=tuple(each["replicas"]),
            session_replicas={name: tuple(found) for name, found in each["session_replicas"].items()},
        )
        for each in answer["data"]
    ]


def _ask_for_spans(url: str, trace_id: str) -> list[StoredSpan]:
    with make_client(url) as client:
        document = get_json(client, f"/v1/traces/{trace_id}")
    _say_who_is_silent(document)
    first_ns = round(document["started"] * 1e9)
    return [
        StoredSpan(
            trace_id=document["id"],
            span_id=each["id"],
            parent_span_id=each["parent"] or "",
            name=each["name"],
            process=each["process"],
            pid=each["pid"],
            start_ns=first_ns + round(each["start_ms"] * 1e6),
            end_ns=first_ns + round((each["start_ms"] + each["duration_ms"]) * 1e6),
            attributes=each["attributes"],
            error_type=each["error_type"] or "",
            error=each["error"] or "",
        )
        for each in document["spans"]
    ]


def _say_who_is_silent(answer: dict[str, Any]) -> None:
    if silent := answer.get("silent_nodes"):
        click.echo(f"Spans of {len(silent)} nodes that do not answer are missing: {', '.join(silent)}", err=True)


def _store(state_dir: Path | None) -> TraceStore:
    return TraceStore(traces_dir(state_dir or default_state_dir()))


def waterfall_lines(spans: Sequence[StoredSpan], width: int, *, attributes: bool = False) -> list[str]:
    """The spans of one trace, children below their parents: name, process, a bar from start to end, and both in ms.

    `spans` are in order of their start; `width` is that of the terminal in characters.
    """
    rows = [(f"{'  ' * depth}{span.name}", span.process.removeprefix("remora."), span) for depth, span in _tree(spans)]
    name_chars = max(len(name) for name, _, _ in rows)
    process_chars = max(len(process) for _, process, _ in rows)
    bar_chars = max(_MIN_BAR_CHARS, min(_MAX_BAR_CHARS, width - name_chars - process_chars - 29))
    first_ns = spans[0].start_ns
    total_ns = max(1, max(span.end_ns for span in spans) - first_ns)
    lines = []
    for name, process, span in rows:
        bar = _bar((span.start_ns - first_ns) / total_ns, (span.end_ns - first_ns) / total_ns, bar_chars)
        start_ms, duration_ms = (span.start_ns - first_ns) / 1e6, span.duration_s * 1e3
        error = f"  FAILED {span.error_type}: {span.error}" if span.error_type else ""
        lines.append(
            f"{name:<{name_chars}}  {process:<{process_chars}}  {bar}  {start_ms:9.1f} {duration_ms:9.1f} ms{error}"
        )
        if attributes:
            indent = " " * (len(name) - len(name.lstrip()) + 2)
            lines += [f"{indent}{key} = {value}" for key, value in span.attributes.items()]
    return lines


def _bar(start: float, end: float, num_chars: int) -> str:
    """A bar within a line of `num_chars`, at least one character long; both ends are shares of the whole."""
    first = min(int(start * num_chars), num_chars - 1)
    last = max(first + 1, round(end * num_chars))
    return " " * first + "█" * (last - first) + " " * (num_chars - last)


def _tree(spans: Sequence[StoredSpan]) -> list[tuple[int, StoredSpan]]:
    """Depth and span, children behind their parents."""
    known = {span.span_id for span in spans}
    children: dict[str, list[StoredSpan]] = defaultdict(list)
    for span in spans:
        # The caller's own span, or one that is not written yet, is not in the files: its children are roots here.
        children[span.parent_span_id if span.parent_span_id in known else ""].append(span)
    found: list[tuple[int, StoredSpan]] = []

    def add(span: StoredSpan, depth: int) -> None:
        found.append((depth, span))
        for child in children[span.span_id]:
            add(child, depth + 1)

    for root in children[""]:
        add(root, 0)
    return found
