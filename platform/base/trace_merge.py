"""One picture of traces from what several nodes have of them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from remora.platform.base.span_file import StoredSpan
from remora.platform.base.trace_store import TraceKey, TraceSummary, in_order


def merge_summaries(parts: Iterable[Iterable[TraceSummary]]) -> list[TraceSummary]:
    """Newest first; what nodes have of the same trace in the same namespace becomes one."""
    found: dict[TraceKey, TraceSummary] = {}
    for part in parts:
        for summary in part:
            key = (summary.trace_id, summary.namespace)
            known = found.get(key)
            found[key] = summary if known is None else _together(known, summary)
    return sorted(found.values(), key=lambda each: each.start_ns, reverse=True)


def merge_spans(parts: Iterable[Iterable[StoredSpan]]) -> list[StoredSpan]:
    """All spans in order, each once."""
    return in_order({span.span_id: span for part in parts for span in part}.values())


def _together(one: TraceSummary, other: TraceSummary) -> TraceSummary:
    """The part with the request's own span names the trace and says how long it took: clocks of nodes differ."""
    outer, inner = sorted((one, other), key=lambda each: (not each.complete, each.start_ns, -each.end_ns))
    failed = outer if outer.error_type else inner
    return msgspec.structs.replace(
        outer,
        session=outer.session or inner.session,
        end_ns=outer.end_ns if outer.complete else max(outer.end_ns, inner.end_ns),
        num_spans=outer.num_spans + inner.num_spans,
        num_errors=outer.num_errors + inner.num_errors,
        replicas=outer.replicas or inner.replicas,
        session_replicas={
            session: outer.session_replicas.get(session) or inner.session_replicas.get(session) or ()
            for session in (*outer.session_replicas, *inner.session_replicas)
        },
        error_type=failed.error_type,
        error=failed.error,
    )
