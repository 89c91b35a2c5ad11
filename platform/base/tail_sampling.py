"""Keeps slow and failed requests that the ratio would have left out.

    request begins ──► sampled? ── yes ──► every process writes its spans at once
                          │ no
                          ▼
             this process remembers its spans ── ends slow or failed ──► written
                                              └─ else ─────────────────► forgotten

Only the process in which requests begin decides so, and only its own spans can be kept: the others were told that the
trace is not sampled, and have recorded nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.util.types import Attributes

#: Of one request; more are not remembered.
_MAX_SPANS = 64


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

    def __init__(self, processors: Sequence[SpanProcessor], slow_s: float) -> None:
        self._processors = processors
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
            for each in (*ended[:-1], span):
                for processor in self._processors:
                    processor.on_end(_sampled(each))

    @property
    def num_open(self) -> int:
        return len(self._open)


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
