"""Traces of several processes are put together from their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ByteSize

from remora.platform.base import telemetry
from remora.platform.base.config import TelemetryConfig
from remora.platform.base.span_file import StoredSpan, prune_span_files
from remora.platform.base.trace_store import TraceQuery, TraceStore
from remora.platform.cli.load_generator import percentile
from remora.platform.cli.table import table_lines
from remora.platform.cli.trace import waterfall_lines
from remora.platform.http.traces import summary_document, trace_document

Run = Callable[..., Any]


def span(span_id: str, parent: str, start_ms: int, end_ms: int, **changes: object) -> StoredSpan:
    base = StoredSpan(
        trace_id="abc123",
        span_id=span_id,
        parent_span_id=parent,
        name=f"work.{span_id}",
        process="remora.router",
        start_ns=1_700_000_000_000_000_000 + start_ms * 1_000_000,
        end_ns=1_700_000_000_000_000_000 + end_ms * 1_000_000,
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    files = {
        "router-1.jsonl": [span("a", "caller", 0, 100)],
        "replica-2.jsonl": [
            span("c", "b", 30, 90, process="remora.replica", error_type="OverQuota", error="full"),
            span("b", "a", 10, 95, attributes={"remora.namespace": "chat"}),
            span("z", "", 5, 6, trace_id="abd999"),
        ],
    }
    (tmp_path / "traces").mkdir()
    for name, spans in files.items():
        (tmp_path / "traces" / name).write_bytes(b"\n".join(msgspec.json.encode(each) for each in spans) + b"\n")
    return tmp_path


def test_a_trace_is_shown_as_a_waterfall_across_processes(run: Run, state_dir: Path) -> None:
    lines = run("trace", "show", "abc", "--state-dir", str(state_dir)).out.splitlines()
    assert [line[:10].rstrip() for line in lines] == ["work.a", "  work.b", "    work.c"]
    assert lines[0].endswith("0.0     100.0 ms")
    assert lines[1].endswith("10.0      85.0 ms")
    assert lines[2].endswith("30.0      60.0 ms  FAILED OverQuota: full")
    bars = [(line.index("█"), line.rindex("█") + 1) for line in lines]
    (first, last), length = bars[0], bars[0][1] - bars[0][0]
    assert [(round((a - first) / length, 1), round((b - first) / length, 1)) for a, b in bars[2:]] == [(0.3, 0.9)]
    assert first <= bars[1][0] <= bars[2][0]
    assert bars[2][1] <= bars[1][1] <= last


def test_attributes_are_shown_when_asked_for(run: Run, state_dir: Path) -> None:
    assert "remora.namespace" not in run("trace", "show", "abc", "--state-dir", str(state_dir)).out
    lines = run("trace", "show", "-a", "abc", "--state-dir", str(state_dir)).out.splitlines()
    assert lines[2].strip() == "remora.namespace = chat"


def test_a_span_whose_parent_is_unknown_is_a_root_and_a_short_one_still_has_a_bar() -> None:
    lines = waterfall_lines([span("a", "gone", 0, 1000), span("b", "", 999, 999)], 80)
    assert len(lines) == 2
    assert not any(line.startswith(" ") for line in lines)
    assert lines[1].count("█") == 1
    assert all(len(line) <= 80 for line in lines)


def test_traces_are_listed_with_the_newest_last(run: Run, state_dir: Path) -> None:
    lines = run("trace", "list", "--state-dir", str(state_dir)).out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["abc123", "abd999", "abc123"]
    assert len(run("trace", "list", "-n", "1", "--state-dir", str(state_dir)).out.splitlines()) == 3
    lines = run("trace", "list", "--namespace", "chat", "--state-dir", str(state_dir)).out.splitlines()
    assert [(line.split()[0], line.split()[3]) for line in lines[2:]] == [("abc123", "chat")]
    lines = run("trace", "list", "--failed", "--min-ms", "90", "--state-dir", str(state_dir)).out.splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["OverQuota"]


def test_a_platform_elsewhere_is_asked_and_says_the_same(run: Run, state_dir: Path, server: Any) -> None:
    store = TraceStore(state_dir / "traces")
    spans = store.spans("abc123")
    server.documents["/v1/traces/abc123"] = trace_document(spans)
    found = store.search(TraceQuery(namespaces=frozenset({"chat"})))
    listed = {"data": [summary_document(each) for each in found], "silent_nodes": ["node-b"]}
    server.documents["/v1/traces?namespace=chat&limit=20"] = listed
    here = ("--state-dir", str(state_dir))
    there = ("--url", server.url)
    assert run("trace", "show", "-a", "abc123", *there).out == run("trace", "show", "-a", "abc123", *here).out
    arguments = ("trace", "list", "--namespace", "chat")
    ran = run(*arguments, *there)
    assert ran.out == run(*arguments, *here).out
    assert "1 nodes that do not answer are missing: node-b" in ran.err
    assert run("trace", "show", "nothing", *there).code == 1


@pytest.mark.parametrize(
    ("beginning", "message"), [("ab", "2 traces begin with 'ab'"), ("x", "no trace begins with 'x'")]
)
def test_a_beginning_must_mean_one_trace(run: Run, state_dir: Path, beginning: str, message: str) -> None:
    ran = run("trace", "show", beginning, "--state-dir", str(state_dir))
    assert ran.code == 1
    assert message in ran.err


def test_the_oldest_files_of_ended_processes_are_pruned_first(tmp_path: Path) -> None:
    import os

    ended = 2**22 + 1  # more than the kernel gives
    alive = [f"router-{os.getpid()}", f"router-{os.getpid()}.old"]
    for age, name in enumerate([f"new-{ended}", f"middle-{ended}.old", f"old-{ended}", *alive]):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    prune_span_files(tmp_path, 250)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted([f"middle-{ended}.old", f"new-{ended}", *alive])
    prune_span_files(tmp_path, 0)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(alive)


def test_a_process_that_starts_prunes_what_others_have_left(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for number in range(8):
        (folder / f"replica-{2**22 + number}.jsonl").write_bytes(b"x" * 2**20)
    telemetry.shutdown_telemetry()
    telemetry.setup_telemetry("router", TelemetryConfig(max_file_bytes=ByteSize(2**20)), tmp_path)
    telemetry.shutdown_telemetry()
    assert len(list(folder.glob("replica-*.jsonl"))) == 4


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) != percentile([], 0.5)


def test_numbers_are_aligned_to_the_right() -> None:
    assert table_lines(["NAME", "N"], [["a", 1], ["long", 22]]) == ["NAME   N", "a      1", "long  22"]
