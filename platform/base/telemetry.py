"""Tracing of one process: where spans go, and how a trace crosses processes.

    setup_telemetry("replica-smollm2", config.telemetry, state_dir)      # once, at the start of a process
    with span(ROUTER_ROUTE, {REMORA_NAMESPACE: "chat"}, parent=request_headers):
        send(request, trace_context=inject())                            # W3C headers: traceparent, tracestate
    ...
    decode = start_span(ENGINE_DECODE, parent=request.trace_context)     # a span that outlives a function
    decode.end()

Spans are written by a background thread to `state_dir/traces/<process>@<host>-<pid>.jsonl`, and sent by OTLP when an
endpoint is configured. Before `setup_telemetry`, or with tracing off, spans record nothing, but an incoming trace
context is still passed on.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from remora.platform.base import telemetry_names as names
from remora.platform.base.config import TelemetryConfig
from remora.platform.base.errors import ConfigError
from remora.platform.base.span_file import SpanFileExporter, prune_span_files, span_file, traces_dir
from remora.platform.base.tail_sampling import KeepSlowAndFailed, RememberUnsampled, recording_sampler

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]

#: Longest a finished span stays in memory: what a `kill -9` can lose.
EXPORT_DELAY_S = 0.5
#: Longest that one export, and so the end of a process, waits for a collector that does not answer.
EXPORT_TIMEOUT_S = 5

#: Spans of ended processes are kept up to so many times the bound of one process.
_KEPT_FILES = 4

_propagator = TraceContextTextMapPropagator()


class _ProcessTelemetry:
    """The one tracer provider of this process, which OpenTelemetry's model needs; nothing else is global."""

    def __init__(self) -> None:
        self.provider: TracerProvider | None = None
        self.tracer: Tracer = trace.NoOpTracer()
        self.remembered: RememberUnsampled | None = None


_process = _ProcessTelemetry()


def setup_telemetry(
    process_name: str,
    config: TelemetryConfig,
    state_dir: Path,
    *,
    requests_begin_here: bool = False,
    on_kept: Callable[[str], None] | None = None,
) -> None:
    """Starts tracing in this process. The first call counts, later ones change nothing.

    `process_name` becomes `service.name` with the prefix "remora." and part of the file's name. The process in which
    requests begin also keeps its spans of slow and failed ones that are not sampled, and says so to `on_kept`, which is
    to have `keep_traces` called in the others (tail_sampling.py).
    Raises ConfigError if the traces cannot be written below `state_dir`.
    """
    if _process.provider is not None or not config.enabled:
        return
    try:
        prune_span_files(traces_dir(state_dir), _KEPT_FILES * int(config.max_file_bytes))
        exporters: list[SpanExporter] = [
            SpanFileExporter(span_file(traces_dir(state_dir), process_name), int(config.max_file_bytes))
        ]
    except OSError as error:
        raise ConfigError(f"cluster.state_dir: cannot write traces below {state_dir}: {error.strerror}") from error
    if config.otlp_endpoint is not None:
        exporters.append(_otlp_exporter(config.otlp_endpoint, config.otlp_protocol))
    keep_slow_s = config.keep_slow_s if config.sample_ratio < 1 else None
    provider = TracerProvider(
        resource=_resource(process_name),
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio))
        if keep_slow_s is None
        else recording_sampler(config.sample_ratio),
        shutdown_on_exit=False,
    )
    processors = [
        BatchSpanProcessor(
            exporter,
            schedule_delay_millis=EXPORT_DELAY_S * 1000,
            export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
        )
        for exporter in exporters
    ]
    for processor in processors:
        provider.add_span_processor(processor)
    if keep_slow_s is not None and requests_begin_here:
        provider.add_span_processor(KeepSlowAndFailed(processors, keep_slow_s, on_kept))
    elif keep_slow_s is not None:
        _process.remembered = RememberUnsampled(processors)
        provider.add_span_processor(_process.remembered)
    _process.provider = provider
    _process.tracer = provider.get_tracer("remora", _version())
    atexit.register(shutdown_telemetry)


def shutdown_telemetry() -> None:
    """Writes what is pending and stops; `setup_telemetry` may be called again. Runs at the exit of the process."""
    provider, _process.provider = _process.provider, None
    _process.tracer, _process.remembered = trace.NoOpTracer(), None
    if provider is not None:
        atexit.unregister(shutdown_telemetry)
        provider.shutdown()


def flush_telemetry(timeout_s: float = EXPORT_TIMEOUT_S) -> bool:
    """Writes what is pending now. False if it took longer than `timeout_s`."""
    return _process.provider is None or _process.provider.force_flush(int(timeout_s * 1000))


def keep_traces(trace_ids: Iterable[str]) -> None:
    """Writes what this process remembers of these traces, which were not sampled, and what it will yet do for them."""
    if _process.remembered is not None:
        _process.remembered.keep(trace_ids)


def tracer() -> Tracer:
    """The tracer of this process; one that records nothing before `setup_telemetry` and when tracing is off."""
    return _process.tracer


def extract(headers: Mapping[str, str] | None) -> Context:
    """The trace context in W3C headers (any case); an empty context without any, or if they are malformed."""
    if not headers:
        return Context()
    return _propagator.extract({name.lower(): value for name, value in headers.items()}, context=Context())


def inject(of: Span | None = None) -> dict[str, str]:
    """W3C headers of the span `of`, or of the current span; empty when there is none."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, context=None if of is None else trace.set_span_in_context(of, Context()))
    return headers


def start_span(
    name: str,
    attributes: Attributes | None = None,
    parent: Mapping[str, str] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    start_time_ns: int | None = None,
) -> Span:
    """A span that is not made current and must be ended by the caller; for work that outlives a function or a thread.

    Its parent is the one in the W3C headers `parent`; None: the current span. Times are Unix nanoseconds.
    """
    context = None if parent is None else extract(parent)
    if _process.provider is None:
        return trace.NonRecordingSpan(trace.get_current_span(context).get_span_context())
    return _process.tracer.start_span(
        name, context=context, kind=kind, attributes=attributes, start_time=start_time_ns, record_exception=False
    )


@contextmanager
def span(
    name: str,
    attributes: Attributes | None = None,
    parent: Mapping[str, str] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Iterator[Span]:
    """A current span around a block of code; an exception marks it as failed with the exception's class and goes on."""
    current = start_span(name, attributes, parent, kind=kind)
    try:
        with trace.use_span(current, record_exception=False, set_status_on_exception=False):
            yield current
    except Exception as error:
        fail(current, error)
        raise
    finally:
        current.end()


def fail(failed: Span, error: BaseException) -> None:
    """Marks a span that has not ended as failed."""
    failed.set_attribute(names.ERROR_TYPE, type(error).__name__)
    failed.set_status(Status(StatusCode.ERROR, str(error)))


def _version() -> str:
    try:
        return version("remora")
    except PackageNotFoundError:
        return "unknown"


def _resource(process_name: str) -> Resource:
    return Resource.create(
        {
            names.SERVICE_NAME: f"remora.{process_name}",
            names.SERVICE_VERSION: _version(),
            names.SERVICE_INSTANCE_ID: f"{socket.gethostname()}-{os.getpid()}",
            names.PROCESS_PID: os.getpid(),
            names.HOST_NAME: socket.gethostname(),
        }
    )


def _otlp_exporter(endpoint: str, protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    path = "" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces"
    return HttpExporter(endpoint=endpoint.rstrip("/") + path, timeout=EXPORT_TIMEOUT_S)
