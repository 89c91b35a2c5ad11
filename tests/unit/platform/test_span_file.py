"""The trace store stays within its bound and survives torn lines."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from remora.platform.base.span_file import SpanFileExporter, prune_span_files, read_spans, span_file


def write_spans(path: Path, *, max_bytes: int, num_spans: int, text: str = "") -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(SpanFileExporter(path, max_bytes)))
    tracer = provider.get_tracer("test")
    for number in range(num_spans):
        tracer.start_span(f"span-{number}", attributes={"text": text}).end()
    provider.shutdown()


def test_both_files_together_stay_within_the_bound_and_keep_the_newest_spans(tmp_path: Path) -> None:
    write_spans(tmp_path / "a-1.jsonl", max_bytes=20_000, num_spans=500)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a-1.jsonl", "a-1.old.jsonl"]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000
    numbers = sorted(int(span.name.removeprefix("span-")) for span in read_spans(tmp_path))
    assert numbers == list(range(numbers[0], 500))
    assert len(numbers) > 30


def test_a_restarted_process_with_the_same_pid_appends_within_the_bound(tmp_path: Path) -> None:
    for _ in range(40):
        write_spans(tmp_path / "a-1.jsonl", max_bytes=4_000, num_spans=5)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4_000


def test_a_span_larger_than_the_bound_is_dropped_alone(tmp_path: Path) -> None:
    write_spans(tmp_path / "a-1.jsonl", max_bytes=4_000, num_spans=1, text="x" * 5_000)
    write_spans(tmp_path / "a-1.jsonl", max_bytes=4_000, num_spans=1)
    assert [span.attributes["text"] for span in read_spans(tmp_path)] == [""]


def test_torn_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a-1.jsonl"
    write_spans(path, max_bytes=100_000, num_spans=2)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"name": "other"}\n\xff\xfe\n' + whole.splitlines()[0][:40])
    assert [span.name for span in read_spans(tmp_path)] == ["span-0", "span-1"]


def test_of_hosts_that_share_a_folder_each_prunes_its_own_and_only_what_is_long_forgotten_of_others(
    tmp_path: Path,
) -> None:
    own = span_file(tmp_path, "replica-org/model")
    assert own.name == f"replica-org_model@{socket.gethostname()}-{os.getpid()}.jsonl"
    ended = own.with_name(own.name.replace(f"-{os.getpid()}.", "-999999999."))
    there, forgotten = tmp_path / "router@pod-b-1.jsonl", tmp_path / "router@pod-c-1.old.jsonl"
    for path in (own, ended, there, forgotten):
        path.write_bytes(b"x" * 100)
    os.utime(forgotten, (0, 0))
    os.utime(there, (time.time() - 86400,) * 2)
    prune_span_files(tmp_path, 100)
    assert {*tmp_path.iterdir()} == {own, ended, there}
    prune_span_files(tmp_path, 0)
    assert {*tmp_path.iterdir()} == {own, there}


def test_a_file_that_another_host_has_removed_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "a-1.jsonl"
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(SpanFileExporter(path, 10_000)))
    tracer = provider.get_tracer("test")
    tracer.start_span("one").end()
    path.unlink()
    tracer.start_span("two").end()
    provider.shutdown()
    assert [span.name for span in read_spans(tmp_path)] == ["two"]


def test_exports_after_the_end_fail_without_raising(tmp_path: Path) -> None:
    exporter = SpanFileExporter(tmp_path / "a-1.jsonl", 1000)
    exporter.shutdown()
    assert exporter.export([]) is SpanExportResult.FAILURE
