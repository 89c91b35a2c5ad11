"""Without a sample, slow and failed requests are still kept, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from remora.platform.base import telemetry
from remora.platform.base.config import TelemetryConfig
from remora.platform.base.span_file import read_spans
from remora.platform.base.tail_sampling import RememberUnsampled

UNSAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}


@pytest.fixture(autouse=True)
def _no_telemetry_left() -> Iterator[None]:
    telemetry.shutdown_telemetry()
    yield
    telemetry.shutdown_telemetry()


def request(name: str, *, failed: bool = False, parent: dict[str, str] | None = None) -> dict[str, str]:
    """A request with one span below it; returns what a replica would be told."""
    root = telemetry.start_span(name, {"n": 1}, parent=parent if parent is not None else {}, kind=SpanKind.SERVER)
    context = telemetry.inject(root)
    telemetry.start_span(f"{name}.route", parent=context).end()
    if failed:
        telemetry.fail(root, ValueError("no"))
    root.end()
    return context


def kept(tmp_path: Path) -> list[str]:
    assert telemetry.flush_telemetry()
    return sorted(span.name for span in read_spans(tmp_path / "traces"))


def start(tmp_path: Path, *, slow_s: float | None, here: bool = True) -> None:
    config = TelemetryConfig(sample_ratio=0.0, keep_slow_s=slow_s)
    telemetry.setup_telemetry("router", config, tmp_path, requests_begin_here=here)


def test_a_failed_request_is_kept_with_what_is_below_it_and_a_good_one_is_not(tmp_path: Path) -> None:
    start(tmp_path, slow_s=1000)
    request("good")
    context = request("bad", failed=True)
    assert kept(tmp_path) == ["bad", "bad.route"]
    root, route = sorted(read_spans(tmp_path / "traces"), key=lambda span: span.name)
    assert route.parent_span_id == root.span_id
    assert (root.error_type, root.attributes["n"], root.process) == ("ValueError", 1, "remora.router")
    assert int(context["traceparent"][-2:], 16) & 1 == 0, "replicas are told to record nothing"


def test_a_slow_request_is_kept(tmp_path: Path) -> None:
    start(tmp_path, slow_s=1e-9)
    request("slow")
    assert kept(tmp_path) == ["slow", "slow.route"]


def test_a_caller_who_does_not_sample_is_left_alone(tmp_path: Path) -> None:
    start(tmp_path, slow_s=1e-9)
    request("theirs", failed=True, parent=UNSAMPLED)
    assert kept(tmp_path) == []


def test_a_process_that_does_not_decide_writes_what_is_wanted_then_and_later(tmp_path: Path) -> None:
    start(tmp_path, slow_s=1000, here=False)
    first, second = (f"00-{digit * 32}-00f067aa0ba902b7-00" for digit in "12")
    telemetry.start_span("mine", parent={"traceparent": first}).end()
    telemetry.start_span("other", parent={"traceparent": second}).end()
    assert kept(tmp_path) == []
    telemetry.keep_traces(["1" * 32, "rubbish", "3" * 32])
    assert kept(tmp_path) == ["mine"]
    telemetry.start_span("mine, later", parent={"traceparent": first}).end()
    telemetry.start_span("other, later", parent={"traceparent": second}).end()
    assert kept(tmp_path) == ["mine", "mine, later"]


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    handed_on: list[str] = []

    class Listed(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            handed_on.append(span.name)

    remember = RememberUnsampled([Listed()], max_traces=3)
    contexts = [SpanContext(number, 1, is_remote=False, trace_flags=TraceFlags(0)) for number in range(1, 6)]
    for context in contexts:
        remember.on_end(ReadableSpan(name=f"{context.trace_id}", context=context))
    remember.keep(f"{context.trace_id:x}" for context in contexts)
    assert handed_on == ["3", "4", "5"]


def test_whoever_decides_says_what_was_kept(tmp_path: Path) -> None:
    said: list[str] = []
    config = TelemetryConfig(sample_ratio=0.0, keep_slow_s=1000)
    telemetry.setup_telemetry("router", config, tmp_path, requests_begin_here=True, on_kept=said.append)
    request("good")
    context = request("bad", failed=True)
    assert said == [context["traceparent"].split("-")[1]]


@pytest.mark.parametrize(("slow_s", "here"), [(None, True), (1e-9, False)])
def test_nothing_is_kept_where_it_is_not_asked_for_or_not_decided(
    tmp_path: Path, slow_s: float | None, here: bool
) -> None:
    start(tmp_path, slow_s=slow_s, here=here)
    request("bad", failed=True)
    assert kept(tmp_path) == []
