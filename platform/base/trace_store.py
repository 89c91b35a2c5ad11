"""The traces of this machine: an index over the span files of all processes, kept up to date by reading what is new.

    files ──refresh──► index: (trace, namespace) ──► figures, and where each span's line lies
                                 │
            search: newest first ┘ └ spans: the lines of one trace, read again from the files

A trace that belongs to several namespaces has an entry in each: a tenant is shown its own part of it and no more.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec

from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import IntegrityError
from remora.platform.base.span_file import StoredSpan, decode_span

#: Traces that the index holds; the oldest go first. Their lines may still be in the files.
MAX_TRACES = 20_000
#: Spans of one trace: a caller may send everything under one trace id.
MAX_SPANS = 2_000
#: Attempts of one trace that a summary speaks of; a fork may have 32 branches.
_MAX_ROUTES = 64
#: The first line of a file begins with its trace and span id, which no other file has: a file is known by it, for
#: files are renamed, and inodes are used again.
_HEAD_BYTES = 80
_SUMMARY_ATTRIBUTES = (
    names.GEN_AI_OPERATION_NAME,
    names.GEN_AI_USAGE_INPUT_TOKENS,
    names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS,
    names.GEN_AI_USAGE_OUTPUT_TOKENS,
    names.REMORA_SESSION_ID,
)


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One trace in one namespace. Times are Unix nanoseconds."""

    trace_id: str
    namespace: str
    #: Of the span that began first, if it has one; of a fork with branches, the parent.
    session: str
    #: Of the span that began first.
    name: str
    start_ns: int
    end_ns: int
    num_spans: int
    num_errors: int
    #: Whether the request's own span, which ends last, is there; without it the request is under way, or was cut off.
    complete: bool
    #: Class and sentence of the outermost error; empty after a success.
    error_type: str
    error: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    #: Where the request ran, in order: more than one after a failover or a move.
    replicas: tuple[str, ...] = ()
    #: The same for each session in it: the branches of a fork are sessions of their own.
    session_replicas: dict[str, tuple[str, ...]] = {}

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class TraceQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which traces are wanted."""

    #: Only of these; None: of all.
    namespaces: frozenset[str] | None = None
    session: str | None = None
    min_ms: float = 0.0
    #: Only those with an error in them.
    failed: bool = False
    limit: int = 50


EVERYTHING: Final = TraceQuery()
#: A trace in a namespace.
TraceKey = tuple[str, str]


class _Line(msgspec.Struct, frozen=True):
    file_no: int
    offset: int
    length: int


class _Trace:
    """What the index knows of a trace in a namespace."""

    __slots__ = ("first", "last_end_ns", "lines", "num_errors", "outer", "routes", "sessions")

    def __init__(self, span: StoredSpan) -> None:
        #: The span that began first; of equals the longest. It names the trace.
        self.first = _slim(span)
        #: The longest failed span: its error is what the client got.
        self.outer: StoredSpan | None = None
        #: In the order in which they were heard of.
        self.sessions: dict[str, None] = {}
        self.last_end_ns = span.end_ns
        self.num_errors = 0
        self.lines: list[_Line] = []
        #: Start, replica and session of each attempt.
        self.routes: list[tuple[int, str, str]] = []

    def add(self, span: StoredSpan, line: _Line) -> None:
        if (span.start_ns, -span.end_ns) < (self.first.start_ns, -self.first.end_ns):
            self.first = _slim(span)
        self.last_end_ns = max(self.last_end_ns, span.end_ns)
        session = str(span.attributes.get(names.REMORA_SESSION_ID, ""))
        if session and len(self.sessions) < _MAX_ROUTES:
            self.sessions[session] = None
        if span.name == names.ROUTER_ROUTE and len(self.routes) < _MAX_ROUTES:
            self.routes.append((span.start_ns, str(span.attributes.get(names.REMORA_REPLICA_ID, "")), session))
        if span.error_type:
            self.num_errors += 1
            if self.outer is None or span.duration_s > self.outer.duration_s:
                self.outer = _slim(span)
        if len(self.lines) < MAX_SPANS:
            self.lines.append(line)

    def summary(self, trace_id: str, namespace: str) -> TraceSummary:
        usage = self.first.attributes
        return TraceSummary(
            trace_id=trace_id,
            namespace=namespace,
            session=str(usage.get(names.REMORA_SESSION_ID) or next(iter(self.sessions), "")),
            name=self.first.name,
            start_ns=self.first.start_ns,
            end_ns=self.last_end_ns,
            num_spans=len(self.lines),
            num_errors=self.num_errors,
            complete=names.GEN_AI_OPERATION_NAME in usage,
            error_type=self.outer.error_type if self.outer is not None else "",
            error=self.outer.error if self.outer is not None else "",
            input_tokens=int(usage.get(names.GEN_AI_USAGE_INPUT_TOKENS, 0)),
            cached_tokens=int(usage.get(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, 0)),
            output_tokens=int(usage.get(names.GEN_AI_USAGE_OUTPUT_TOKENS, 0)),
            replicas=_in_turn(self.routes),
            session_replicas={
                session: _in_turn(each for each in self.routes if each[2] == session) for session in self.sessions
            },
        )


def _in_turn(routes: Iterable[tuple[int, str, str]]) -> tuple[str, ...]:
    """Replicas by the time of the attempts there; those that follow each other are different ones."""
    return tuple(replica for replica, _ in groupby(replica for _, replica, _ in sorted(routes)))


def _slim(span: StoredSpan) -> StoredSpan:
    """With what a summary needs; attributes can be as long as prompts."""
    kept = {name: span.attributes[name] for name in _SUMMARY_ATTRIBUTES if name in span.attributes}
    return msgspec.structs.replace(span, attributes=kept)


def in_order(spans: Iterable[StoredSpan]) -> list[StoredSpan]:
    """By their start; of spans that start together the longest first."""
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


class _File:
    __slots__ = ("file_no", "path", "read_bytes")

    def __init__(self, file_no: int, path: Path) -> None:
        self.file_no = file_no
        self.path = path
        #: Up to here, the end of a line, the file is in the index.
        self.read_bytes = 0


class TraceStore:
    """Blocking, and safe to call from several threads: call it from a thread of its own."""

    def __init__(self, directory: Path, *, max_traces: int = MAX_TRACES) -> None:
        self._directory = directory
        self._max_traces = max_traces
        self._lock = threading.Lock()
        self._files: dict[bytes, _File] = {}
        self._num_files_seen = 0
        #: In the order in which the index first heard of them.
        self._traces: dict[TraceKey, _Trace] = {}

    def search(self, query: TraceQuery = EVERYTHING) -> list[TraceSummary]:
        """Newest first."""

        def wanted(namespace: str, trace: _Trace) -> bool:
            return (
                (query.namespaces is None or namespace in query.namespaces)
                and (query.session is None or query.session in trace.sessions)
                and (trace.last_end_ns - trace.first.start_ns) / 1e6 >= query.min_ms
                and (not query.failed or trace.num_errors > 0)
            )

        with self._lock:
            self._refresh()
            found = heapq.nlargest(
                query.limit,
                (item for item in self._traces.items() if wanted(item[0][1], item[1])),
                key=lambda item: item[1].first.start_ns,
            )
            return [trace.summary(*key) for key, trace in found]

    def summaries(self, keys: Iterable[TraceKey]) -> list[TraceSummary]:
        """Of these traces, those that are here."""
        with self._lock:
            self._refresh()
            return [trace.summary(*key) for key in keys if (trace := self._traces.get(key)) is not None]

    def spans(self, trace_id: str, *, namespaces: Collection[str] | None = None) -> list[StoredSpan]:
        """All spans of a trace by start time, of these namespaces; empty when there are none."""
        with self._lock:
            self._refresh()
            lines = [
                line
                for (known_id, namespace), trace in self._traces.items()
                if known_id == trace_id and (namespaces is None or namespace in namespaces)
                for line in trace.lines
            ]
            spans = self._read(lines)
        return in_order(spans)

    def find(self, beginning: str, *, namespaces: Collection[str] | None = None) -> list[str]:
        """Ids of the traces that begin so."""
        with self._lock:
            self._refresh()
            return sorted(
                {
                    trace_id
                    for trace_id, namespace in self._traces
                    if trace_id.startswith(beginning) and (namespaces is None or namespace in namespaces)
                }
            )

    def check_integrity(self) -> None:
        """Raises IntegrityError when the index points to where nothing was read, or is larger than its bounds."""
        with self._lock:
            read_bytes = {file.file_no: file.read_bytes for file in self._files.values()}
            for (trace_id, _), trace in self._traces.items():
                if not 0 < len(trace.lines) <= MAX_SPANS:
                    raise IntegrityError(f"trace {trace_id} has {len(trace.lines)} spans")
                if any(line.offset + line.length > read_bytes.get(line.file_no, 0) for line in trace.lines):
                    raise IntegrityError(f"trace {trace_id} has a span behind the end of what was read")
            if len(self._traces) > self._max_traces:
                raise IntegrityError(f"the index holds {len(self._traces)} traces, more than {self._max_traces}")

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Reads what processes have written since the last time, and forgets files that are gone."""
        seen: set[bytes] = set()
        for path in sorted(self._directory.glob("*.jsonl")):
            try:
                with path.open("rb") as stream:
                    head = stream.read(_HEAD_BYTES)
                    if len(head) < _HEAD_BYTES:
                        continue  # nothing whole yet
                    file = self._files.get(head)
                    if file is None:
                        self._num_files_seen += 1
                        file = self._files[head] = _File(self._num_files_seen, path)
                    file.path = path
                    seen.add(head)
                    stream.seek(file.read_bytes)
                    self._take(file, stream.read())
            except FileNotFoundError:  # turned over between listing and opening
                continue
        gone = {self._files.pop(head).file_no for head in self._files.keys() - seen}
        if gone:
            self._drop_lines(lambda line: line.file_no in gone)
        while len(self._traces) > self._max_traces:
            del self._traces[next(iter(self._traces))]

    def _take(self, file: _File, content: bytes) -> None:
        end = content.rfind(b"\n") + 1
        offset = file.read_bytes
        for line in content[:end].splitlines(keepends=True):
            span = decode_span(line)
            if span is not None:
                key = (span.trace_id, str(span.attributes.get(names.REMORA_NAMESPACE, "")))
                trace = self._traces.get(key)
                if trace is None:
                    trace = self._traces[key] = _Trace(span)
                trace.add(span, _Line(file.file_no, offset, len(line)))
            offset += len(line)
        file.read_bytes = offset

    def _drop_lines(self, gone: Callable[[_Line], bool]) -> None:
        for key, trace in list(self._traces.items()):
            trace.lines = [line for line in trace.lines if not gone(line)]
            if not trace.lines:
                del self._traces[key]

    def _read(self, lines: list[_Line]) -> list[StoredSpan]:
        spans: list[StoredSpan] = []
        for head, file in self._files.items():
            own = [line for line in lines if line.file_no == file.file_no]
            if not own:
                continue
            try:
                with file.path.open("rb") as stream:
                    if stream.read(_HEAD_BYTES) != head:
                        continue  # turned over since
                    for line in own:
                        stream.seek(line.offset)
                        span = decode_span(stream.read(line.length))
                        if span is not None:
                            spans.append(span)
            except FileNotFoundError:
                continue
        return spans
