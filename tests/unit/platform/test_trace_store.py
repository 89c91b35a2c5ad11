"""The index follows the span files: new lines, turned-over files, namespaces apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from remora.platform.base import telemetry_names as names
from remora.platform.base.span_file import SpanFileExporter, StoredSpan
from remora.platform.base.trace_store import MAX_SPANS, TraceQuery, TraceStore

MS = 1_000_000


def span(trace: str, span_id: str, start_ms: int, end_ms: int, namespace: str = "chat", **changes: object) -> bytes:
    attributes = changes.pop("attributes", {})
    stored = StoredSpan(
        trace_id=trace * 32,
        span_id=f"{span_id:0>16}",
        name=f"work.{span_id}",
        process="remora.router",
        start_ns=start_ms * MS,
        end_ns=end_ms * MS,
        attributes={names.REMORA_NAMESPACE: namespace, **attributes},  # type: ignore[dict-item]
    )
    return msgspec.json.encode(msgspec.structs.replace(stored, **changes)) + b"\n"


def append(path: Path, *lines: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(b"".join(lines))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    made = TraceStore(tmp_path)
    yield made
    made.check_integrity()


def ids(store: TraceStore, **query: object) -> list[str]:
    return [each.trace_id[0] for each in store.search(TraceQuery(**query))]  # type: ignore[arg-type]


def test_a_trace_of_two_processes_is_one_and_is_named_by_what_began_first(store: TraceStore, tmp_path: Path) -> None:
    append(tmp_path / "replica-2.jsonl", span("a", "2", 20, 80, error_type="OverQuota", error="full"))
    usage = {
        names.GEN_AI_USAGE_INPUT_TOKENS: 36,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 32,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: 5,
        names.REMORA_SESSION_ID: "trip",
    }
    append(tmp_path / "router-1.jsonl", span("a", "1", 10, 100, attributes=usage, error_type="OverQuota", error="no"))
    (found,) = store.search()
    assert (found.name, found.duration_ms, found.num_spans, found.session) == ("work.1", 90.0, 2, "trip")
    assert (found.input_tokens, found.cached_tokens, found.output_tokens) == (36, 32, 5)
    assert (found.num_errors, found.error) == (2, "no")
    assert not found.complete, "the request's own span is missing"
    assert [each.name for each in store.spans("a" * 32)] == ["work.1", "work.2"]


def test_lines_are_seen_as_they_are_written_and_torn_ones_when_they_are_whole(
    store: TraceStore, tmp_path: Path
) -> None:
    path = tmp_path / "router-1.jsonl"
    append(path, span("a", "1", 0, 1))
    assert ids(store) == ["a"]
    line = span("b", "1", 5, 6)
    append(path, b"rubbish\n", line[:50])
    assert ids(store) == ["a"]
    append(path, line[50:])
    assert ids(store) == ["b", "a"]
    assert len(store.spans("b" * 32)) == 1


def test_another_store_finds_everything_again(store: TraceStore, tmp_path: Path) -> None:
    append(tmp_path / "router-1.jsonl", span("a", "1", 0, 1), span("b", "1", 2, 3))
    assert store.search() == TraceStore(tmp_path).search()
    assert len(store.search()) == 2


def test_what_a_query_asks_for_is_what_it_gets(store: TraceStore, tmp_path: Path) -> None:
    append(
        tmp_path / "router-1.jsonl",
        span("a", "1", 0, 10, "chat"),
        span("b", "1", 20, 120, "chat", attributes={names.REMORA_SESSION_ID: "s"}),
        span("c", "1", 30, 40, "code", error_type="OverQuota"),
    )
    assert ids(store) == ["c", "b", "a"]
    assert ids(store, namespaces=frozenset({"chat"})) == ["b", "a"]
    assert ids(store, namespaces=frozenset()) == []
    assert ids(store, session="s") == ["b"]
    assert ids(store, min_ms=100) == ["b"]
    assert ids(store, failed=True) == ["c"]
    assert ids(store, limit=1) == ["c"]
    assert store.find("a") == ["a" * 32]
    assert store.find("a", namespaces={"code"}) == []


def test_two_namespaces_under_one_trace_id_never_see_each_other(store: TraceStore, tmp_path: Path) -> None:
    append(
        tmp_path / "router-1.jsonl",
        span("a", "1", 0, 10, "chat"),
        span("a", "2", 5, 500, "code", error_type="OverQuota", error="secret"),
    )
    (found,) = store.search(TraceQuery(namespaces=frozenset({"chat"})))
    assert (found.num_spans, found.duration_ms, found.error) == (1, 10.0, "")
    assert [each.name for each in store.spans("a" * 32, namespaces={"chat"})] == ["work.1"]
    assert len(store.spans("a" * 32)) == 2


def test_a_file_that_turns_over_is_followed_and_what_is_dropped_is_forgotten(tmp_path: Path) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(SpanFileExporter(tmp_path / "a-1.jsonl", 6_000)))
    tracer = provider.get_tracer("test")
    store = TraceStore(tmp_path)
    for number in range(100):
        tracer.start_span(f"span-{number}").end()
        newest = store.search(TraceQuery(limit=1))[0]
        assert newest.name == f"span-{number}"
        assert [each.name for each in store.spans(newest.trace_id)] == [newest.name]
        store.check_integrity()
    provider.shutdown()
    listed = store.search(TraceQuery(limit=500))
    assert 5 < len(listed) < 60
    assert all(store.spans(each.trace_id) for each in listed)
    assert listed == TraceStore(tmp_path).search(TraceQuery(limit=500))


def test_the_index_is_bounded_in_traces_and_in_spans_of_one(tmp_path: Path) -> None:
    store = TraceStore(tmp_path, max_traces=3)
    append(tmp_path / "a-1.jsonl", *(span(letter, "1", number, number + 1) for number, letter in enumerate("abcdef")))
    assert ids(store) == ["f", "e", "d"]
    append(tmp_path / "a-1.jsonl", *(span("g", str(number), 50, 60) for number in range(MAX_SPANS + 5)))
    assert len(store.spans("g" * 32)) == MAX_SPANS
    store.check_integrity()
