"""Spans reach the file and a real OTLP receiver, with one trace across processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.trace import StatusCode

from remora.platform.base import telemetry
from remora.platform.base import telemetry_names as names
from remora.platform.base.config import TelemetryConfig
from remora.platform.base.errors import ConfigError
from remora.platform.base.span_file import StoredSpan, read_spans

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
INCOMING = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}


@pytest.fixture(autouse=True)
def _no_telemetry_left() -> Iterator[None]:
    telemetry.shutdown_telemetry()
    yield
    telemetry.shutdown_telemetry()


def stored(state_dir: Path) -> dict[str, StoredSpan]:
    assert telemetry.flush_telemetry()
    return {span.name: span for span in read_spans(state_dir / "traces")}


def test_nested_spans_become_one_trace_in_the_file(tmp_path: Path) -> None:
    telemetry.setup_telemetry("router", TelemetryConfig(), tmp_path)
    with (
        telemetry.span(names.ROUTER_ROUTE, {names.REMORA_NAMESPACE: "chat"}, parent=INCOMING),
        telemetry.span(names.POOL_ADMIT, {names.REMORA_ADMIT_BLOCKS: 3, "list": ["a", "b"]}),
    ):
        time.sleep(0.002)
    spans = stored(tmp_path)
    route, admit = spans[names.ROUTER_ROUTE], spans[names.POOL_ADMIT]
    assert (route.trace_id, route.parent_span_id) == (TRACE_ID, PARENT_ID)
    assert (admit.trace_id, admit.parent_span_id) == (TRACE_ID, route.span_id)
    assert route.process == "remora.router"
    assert admit.attributes == {names.REMORA_ADMIT_BLOCKS: 3, "list": ["a", "b"]}
    assert 0.002 <= admit.duration_s <= route.duration_s < 10
    assert abs(route.end_ns - time.time_ns()) < 60e9


def test_injected_headers_carry_the_trace_to_another_process(tmp_path: Path) -> None:
    telemetry.setup_telemetry("router", TelemetryConfig(), tmp_path)
    with telemetry.span(names.ROUTER_ROUTE, parent=INCOMING):
        headers = telemetry.inject()
    assert headers["tracestate"] == "vendor=1"
    child = (
        "import sys; from pathlib import Path; from remora.platform.base import telemetry\n"
        "from remora.platform.base.config import TelemetryConfig\n"
        "telemetry.setup_telemetry('replica', TelemetryConfig(), Path(sys.argv[1]))\n"
        "telemetry.start_span('engine.decode', parent={'Traceparent': sys.argv[2]}).end()\n"
    )
    subprocess.run([sys.executable, "-c", child, str(tmp_path), headers["traceparent"]], check=True, timeout=60)
    spans = stored(tmp_path)
    assert spans["engine.decode"].parent_span_id == spans[names.ROUTER_ROUTE].span_id
    assert spans["engine.decode"].trace_id == TRACE_ID
    assert spans["engine.decode"].pid != spans[names.ROUTER_ROUTE].pid
    assert len(list((tmp_path / "traces").iterdir())) == 2


def test_a_span_that_outlives_its_thread_keeps_its_times(tmp_path: Path) -> None:
    telemetry.setup_telemetry("replica", TelemetryConfig(), tmp_path)
    decode = telemetry.start_span(names.ENGINE_DECODE, parent=INCOMING, start_time_ns=1_000)
    thread = Thread(target=lambda: decode.end(end_time=3_000))
    thread.start()
    thread.join()
    span = stored(tmp_path)[names.ENGINE_DECODE]
    assert (span.start_ns, span.end_ns, span.parent_span_id) == (1_000, 3_000, PARENT_ID)


def test_an_exception_marks_the_span_and_goes_on(tmp_path: Path) -> None:
    telemetry.setup_telemetry("router", TelemetryConfig(), tmp_path)
    with pytest.raises(KeyError), telemetry.span(names.ROUTER_ROUTE):
        raise KeyError("nowhere")
    span = stored(tmp_path)[names.ROUTER_ROUTE]
    assert (span.error_type, span.error) == ("KeyError", "'nowhere'")


@pytest.mark.parametrize("headers", [{"traceparent": "rubbish"}, {}, {"traceparent": "00-" + "0" * 32 + "-x-01"}])
def test_malformed_headers_start_a_new_trace(tmp_path: Path, headers: dict[str, str]) -> None:
    telemetry.setup_telemetry("router", TelemetryConfig(), tmp_path)
    with telemetry.span(names.ROUTER_ROUTE, parent=headers):
        pass
    span = stored(tmp_path)[names.ROUTER_ROUTE]
    assert span.parent_span_id == ""
    assert len(span.trace_id) == 32


def test_an_unsampled_parent_is_respected_and_passed_on(tmp_path: Path) -> None:
    telemetry.setup_telemetry("router", TelemetryConfig(), tmp_path)
    with telemetry.span(names.ROUTER_ROUTE, parent={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}):
        assert telemetry.inject()["traceparent"].startswith(f"00-{TRACE_ID}-")
        assert telemetry.inject()["traceparent"].endswith("-00")
    assert stored(tmp_path) == {}


def test_sample_ratio_zero_records_nothing_and_still_follows_a_sampled_parent(tmp_path: Path) -> None:
    telemetry.setup_telemetry("router", TelemetryConfig(sample_ratio=0.0), tmp_path)
    with telemetry.span("alone"):
        pass
    with telemetry.span("followed", parent=INCOMING):
        pass
    assert set(stored(tmp_path)) == {"followed"}


def test_tracing_that_is_off_writes_nothing_and_passes_the_callers_context_on(tmp_path: Path) -> None:
    telemetry.setup_telemetry("router", TelemetryConfig(enabled=False), tmp_path)
    with telemetry.span(names.ROUTER_ROUTE, {"a": 1}, parent=INCOMING):
        assert telemetry.inject()["traceparent"] == INCOMING["traceparent"]
    with telemetry.span("outside"):
        assert telemetry.inject() == {}
    assert not (tmp_path / "traces").exists()


def test_the_second_setup_changes_nothing(tmp_path: Path) -> None:
    telemetry.setup_telemetry("first", TelemetryConfig(), tmp_path)
    telemetry.setup_telemetry("second", TelemetryConfig(), tmp_path / "elsewhere")
    with telemetry.span("work"):
        pass
    assert stored(tmp_path)["work"].process == "remora.first"
    assert not (tmp_path / "elsewhere").exists()


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cluster\.state_dir.*file"):
        telemetry.setup_telemetry("router", TelemetryConfig(), tmp_path / "file")


class _GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, received: list[Any]) -> None:
        self.received = received

    def Export(self, request: Any, context: Any) -> Any:
        self.received.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def check_received(received: list[Any]) -> None:
    resource_spans = [item for request in received for item in request.resource_spans]
    services = {
        a.value.string_value for item in resource_spans for a in item.resource.attributes if a.key == "service.name"
    }
    spans = [span for item in resource_spans for scope in item.scope_spans for span in scope.spans]
    assert services == {"remora.router"}
    assert [span.name for span in spans] == [names.ROUTER_ROUTE]
    assert spans[0].trace_id.hex() == TRACE_ID
    assert spans[0].parent_span_id.hex() == PARENT_ID
    assert spans[0].status.code == StatusCode.ERROR.value


def send_one_failed_span(state_dir: Path, config: TelemetryConfig) -> None:
    telemetry.setup_telemetry("router", config, state_dir)
    failed = telemetry.start_span(names.ROUTER_ROUTE, parent=INCOMING)
    telemetry.fail(failed, ValueError("no"))
    failed.end()
    telemetry.shutdown_telemetry()


def test_spans_reach_an_otlp_receiver_over_grpc(tmp_path: Path) -> None:
    received: list[Any] = []
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_GrpcCollector(received), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        send_one_failed_span(tmp_path, TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}"))
    finally:
        server.stop(0)
    check_received(received)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_spans_reach_an_otlp_receiver_over_http(tmp_path: Path, path: str) -> None:
    received: list[Any] = []
    paths: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}{path}"
        send_one_failed_span(tmp_path, TelemetryConfig(otlp_endpoint=endpoint, otlp_protocol="http"))
        server.shutdown()
    check_received(received)
    assert paths == ["/v1/traces"]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_collector_that_is_away_neither_stops_the_work_nor_the_file(tmp_path: Path, protocol: Any) -> None:
    config = TelemetryConfig(otlp_endpoint="http://127.0.0.1:9", otlp_protocol=protocol)
    started = time.monotonic()
    send_one_failed_span(tmp_path, config)
    assert time.monotonic() - started < 15
    assert [span.name for span in read_spans(tmp_path / "traces")] == [names.ROUTER_ROUTE]
