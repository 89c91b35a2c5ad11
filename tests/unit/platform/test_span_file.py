"""The trace store stays within its bound and survives torn lines."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from remora.platform.base.span_file import SpanFileExporter, read_spans


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


def test_exports_after_the_end_fail_without_raising(tmp_path: Path) -> None:
    exporter = SpanFileExporter(tmp_path / "a-1.jsonl", 1000)
    exporter.shutdown()
    assert exporter.export([]) is SpanExportResult.FAILURE
