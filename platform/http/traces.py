"""GET /v1/traces: what the processes of all nodes have written about requests."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from remora.platform.base.errors import NotFound
from remora.platform.base.span_file import StoredSpan
from remora.platform.base.trace_store import TraceQuery, TraceSummary
from remora.platform.http.caller import Caller, caller_of
from remora.platform.http.errors import invalid_request
from remora.platform.http.json_response import MsgspecJSONResponse
from remora.platform.http.services import Services


class TracesParameters(BaseModel):
    """GET /v1/traces."""

    model_config = ConfigDict(extra="forbid")

    namespace: str | None = None
    session: str | None = None
    #: Only traces that took at least so long.
    min_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    #: Only traces with an error in them.
    failed: bool = False
    limit: Annotated[int, Field(ge=1, le=500)] = 50


def trace_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/traces")
    async def list_traces(request: Request) -> Response:
        """Traces of the caller's namespaces, newest first."""
        try:
            given = TracesParameters.model_validate(dict(request.query_params))
        except ValidationError as error:
            raise invalid_request(error) from None
        found = await services.traces.search(
            TraceQuery(
                namespaces=_visible(caller_of(request), given.namespace),
                session=given.session,
                min_ms=given.min_ms,
                failed=given.failed,
                limit=given.limit,
            )
        )
        data = [summary_document(each) for each in found.items]
        return MsgspecJSONResponse({"object": "list", "data": data, "silent_nodes": found.silent_nodes})

    @router.get("/v1/traces/{trace_id}")
    async def show_trace(request: Request, trace_id: str) -> Response:
        """All spans of one trace, by start time."""
        found = await services.traces.spans(trace_id, caller_of(request).namespaces)
        if not found.items:
            silent = f", or be on one of the nodes that do not answer: {', '.join(found.silent_nodes)}"
            raise NotFound(
                f"There is no trace {trace_id!r}; it may have been dropped from the bounded files, or not be written"
                f" yet, which takes half a second{silent if found.silent_nodes else ''}.",
                field="trace_id",
            )
        return MsgspecJSONResponse({**trace_document(found.items), "silent_nodes": found.silent_nodes})

    return router


def _visible(caller: Caller, namespace: str | None) -> frozenset[str] | None:
    if namespace is None:
        return caller.namespaces
    return frozenset({namespace} if caller.sees(namespace) else ())


def summary_document(trace: TraceSummary) -> dict[str, Any]:
    """One line of the list."""
    return {
        "id": trace.trace_id,
        "object": "trace",
        "namespace": trace.namespace,
        "session": trace.session or None,
        "name": trace.name,
        "started": trace.start_ns / 1e9,
        "duration_ms": round(trace.duration_ms, 3),
        "num_spans": trace.num_spans,
        "num_errors": trace.num_errors,
        "complete": trace.complete,
        "error_type": trace.error_type or None,
        "error": trace.error or None,
        "input_tokens": trace.input_tokens,
        "cached_tokens": trace.cached_tokens,
        "output_tokens": trace.output_tokens,
        "replicas": trace.replicas,
        "session_replicas": trace.session_replicas,
    }


def trace_document(spans: list[StoredSpan]) -> dict[str, Any]:
    """A trace whose spans are in order of their start, which is given from the start of the first."""
    first_ns = spans[0].start_ns
    return {
        "id": spans[0].trace_id,
        "object": "trace",
        "started": first_ns / 1e9,
        "duration_ms": round((max(span.end_ns for span in spans) - first_ns) / 1e6, 3),
        "spans": [
            {
                "id": span.span_id,
                "parent": span.parent_span_id or None,
                "name": span.name,
                "process": span.process,
                "pid": span.pid,
                "start_ms": round((span.start_ns - first_ns) / 1e6, 3),
                "duration_ms": round(span.duration_s * 1e3, 3),
                "error_type": span.error_type or None,
                "error": span.error or None,
                "attributes": span.attributes,
            }
            for span in spans
        ],
    }
