"""Keeps slow and failed requests that the ratio would have left out.

    request begins ──► sampled? ── yes ──► every process writes its spans at once
                          │ no
                          ▼
             every process remembers its spans ── ends slow or failed ──► written, elsewhere once they are told
                                               └─ else ─────────────────► forgotten

The process in which requests begin decides. What others remember is bounded: the oldest traces go first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState, format_trace_id
from opentelemetry.util.types import Attributes

#: Of one request; more are not remembered.
_MAX_SPANS = 64
#: Requests that a process remembers which does not see them end; and as many that it was told to keep.
MAX_REMEMBERED = 1024


class _RecordInstead(Sampler):
    """Spans that the inner sampler drops are recorded, so that they can be judged when they end."""

    def __init__(self, inner: Sampler | None) -> None:
        """None: drops everything but leaves requests to those who called: their decision is theirs."""
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if self._inner is None:
            return SamplingResult(Decision.DROP if kind is SpanKind.SERVER else Decision.RECORD_ONLY, attributes)
        result = self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links)
        return SamplingResult(Decision.RECORD_ONLY, attributes) if result.decision is Decision.DROP else result

    def get_description(self) -> str:
        return "RecordInstead"


def recording_sampler(sample_ratio: float) -> Sampler:
    """The sampler of the process that decides: what is not sampled is recorded all the same."""
    recorded = _RecordInstead(None)
    return ParentBased(
        _RecordInstead(TraceIdRatioBased(sample_ratio)),
        remote_parent_not_sampled=recorded,
        local_parent_not_sampled=recorded,
    )


class KeepSlowAndFailed(SpanProcessor):
    """Hands the spans of unsampled requests on once the request has turned out slow or failed."""

    def __init__(
        self, processors: Sequence[SpanProcessor], slow_s: float, on_kept: Callable[[str], None] | None = None
    ) -> None:
        """`on_kept` is called with the id of each trace that is kept so, in the thread that ended it."""
        self._processors = processors
        self._on_kept = on_kept
        self._slow_ns = int(slow_s * 1e9)
        self._lock = threading.Lock()
        #: Trace id → spans that have ended, of the requests that are under way.
        self._open: dict[int, list[ReadableSpan]] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if span.kind is SpanKind.SERVER and not span.context.trace_flags.sampled:
            with self._lock:
                self._open.setdefault(span.context.trace_id, [])

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or context.trace_flags.sampled:
            return
        with self._lock:
            ended = self._open.get(context.trace_id)
            if ended is None:
                return
            if len(ended) < _MAX_SPANS:
                ended.append(span)
            if span.kind is not SpanKind.SERVER:
                return
            del self._open[context.trace_id]
        if not span.status.is_ok or (span.end_time or 0) - (span.start_time or 0) >= self._slow_ns:
            _hand_on((*ended[:-1], span), self._processors)
            if self._on_kept is not None:
                self._on_kept(format_trace_id(context.trace_id))


class RememberUnsampled(SpanProcessor):
    """Holds the spans of unsampled requests until they are wanted, or too many others have come."""

    def __init__(self, processors: Sequence[SpanProcessor], max_traces: int = MAX_REMEMBERED) -> None:
        self._processors = processors
        self._max_traces = max_traces
        self._lock = threading.Lock()
        #: Trace id → spans that have ended.
        self._held: OrderedDict[int, list[ReadableSpan]] = OrderedDict()
        #: What ends later of these goes on at once.
        self._wanted: OrderedDict[int, None] = OrderedDict()

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or context.trace_flags.sampled:
            return
        with self._lock:
            if context.trace_id not in self._wanted:
                held = self._held.setdefault(context.trace_id, [])
                if len(held) < _MAX_SPANS:
                    held.append(span)
                _bound(self._held, self._max_traces)
                return
        _hand_on((span,), self._processors)

    def keep(self, trace_ids: Iterable[str]) -> None:
        """Hands on what is and will be here of these traces. Ids are hexadecimal; others are ignored."""
        for text in trace_ids:
            try:
                trace_id = int(text, 16)
            except ValueError:
                continue
            with self._lock:
                spans = self._held.pop(trace_id, [])
                self._wanted[trace_id] = None
                _bound(self._wanted, self._max_traces)
            _hand_on(spans, self._processors)


def _bound(known: OrderedDict[int, Any], max_length: int) -> None:
    while len(known) > max_length:
        known.popitem(last=False)


def _hand_on(spans: Iterable[ReadableSpan], processors: Sequence[SpanProcessor]) -> None:
    for span in spans:
        for processor in processors:
            processor.on_end(_sampled(span))


def _sampled(span: ReadableSpan) -> ReadableSpan:
    """The same span, as if it had been sampled from the start."""
    context = span.get_span_context()
    assert context is not None, "an ended span has a context"
    return ReadableSpan(
        name=span.name,
        context=SpanContext(
            context.trace_id, context.span_id, False, TraceFlags(TraceFlags.SAMPLED), context.trace_state
        ),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
