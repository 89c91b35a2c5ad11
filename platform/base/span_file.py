"""The embedded trace store: one bounded JSON-lines file of finished spans per process, readable with nothing installed.

traces/router@node-a-4711.jsonl         the newest spans
traces/router@node-a-4711.old.jsonl     those before; dropped at the next turn

Pods may share one folder: a name says which host knows whether its process is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id

from remora.platform.base import telemetry_names as names

logger = logging.getLogger(__name__)

#: Ends of names; files of earlier versions are without a host.
_NAME = re.compile(r"(?:@(?P<host>[^@]+))?-(?P<pid>\d+)(?:\.old)?\.jsonl$")
_FOREIGN_KEPT_S = 7 * 86400.0


class StoredSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a file. Ids are hexadecimal; times are Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    name: str
    process: str = ""
    pid: int = 0
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = {}
    #: Class of the error that ended the span, and its sentence; both empty after a success.
    error_type: str = ""
    error: str = ""

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class SpanFileExporter(SpanExporter):
    """Appends spans to a file; the file and its predecessor together never exceed `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Opens the file at once. Raises OSError if it cannot be written."""
        self._path = path
        self._old_path = path.with_name(f"{path.stem}.old{path.suffix}")
        self._max_bytes = max_bytes // 2
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("ab")
        self._size_bytes = self._file.tell()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = [_line(span) for span in spans]
        with self._lock:
            if self._file.closed:
                return SpanExportResult.FAILURE
            try:
                if not self._path.exists():  # another host took its process for long gone
                    self._open()
                for line in lines:
                    self._append(line)
                self._file.flush()
            except OSError as error:
                logger.warning("spans are lost: %s cannot be written: %s", self._path, error)
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        with self._lock:
            self._file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def _append(self, line: bytes) -> None:
        if len(line) > self._max_bytes:
            logger.warning("a span of %d bytes is lost: %s may hold %d", len(line), self._path, self._max_bytes)
            return
        if self._size_bytes + len(line) > self._max_bytes:
            self._file.close()
            self._path.replace(self._old_path)
            self._open()
        self._file.write(line)
        self._size_bytes += len(line)


def traces_dir(state_dir: Path) -> Path:
    """Folder of all processes' files."""
    return state_dir / "traces"


def folder_id(directory: Path) -> str:
    """What tells a folder of traces from those of other nodes, wherever it is mounted; empty when it is not there."""
    path = directory / "folder-id"
    if not path.exists():
        if not directory.is_dir():
            return ""
        own = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
        own.write_text(uuid.uuid4().hex)
        with contextlib.suppress(FileExistsError):  # another process was first
            path.hardlink_to(own)
        own.unlink()
    return path.read_text()


def span_file(directory: Path, process_name: str) -> Path:
    """The file of this process."""
    return directory / f"{_plain(process_name)}@{_plain(socket.gethostname())}-{os.getpid()}.jsonl"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def prune_span_files(directory: Path, max_bytes: int) -> None:
    """Removes files of processes that have ended, those written to longest ago first, until those of this host take at
    most `max_bytes` together. Whether a process of another host lives cannot be told: its file goes when nothing has
    been written to it for a week."""
    left_bytes = max_bytes
    found: list[tuple[int, int, Path]] = []
    for path in directory.glob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # another process prunes as well
            match, status = _NAME.search(path.name), path.stat()
            if match is not None and match["host"] not in (None, _plain(socket.gethostname())):
                if time.time() - status.st_mtime > _FOREIGN_KEPT_S:
                    path.unlink(missing_ok=True)
            elif match is None or not Path(f"/proc/{match['pid']}").exists():
                found.append((status.st_mtime_ns, status.st_size, path))
    for _, size_bytes, path in sorted(found, reverse=True):
        left_bytes -= size_bytes
        if left_bytes < 0:
            path.unlink(missing_ok=True)


def read_spans(directory: Path) -> Iterator[StoredSpan]:
    """All spans of all processes, file by file, in the order they ended. Torn and foreign lines are skipped."""
    for path in sorted(directory.glob("*.jsonl")):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # turned over between listing and reading
            continue
        for line in content.splitlines():
            span = decode_span(line)
            if span is not None:
                yield span


def decode_span(line: bytes) -> StoredSpan | None:
    """The span of one line; None if it is torn or foreign."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(StoredSpan)


def _line(span: ReadableSpan) -> bytes:
    context = span.get_span_context()
    assert context is not None, "an ended span has a context"
    resource: Mapping[str, Any] = span.resource.attributes
    attributes = dict(span.attributes or {})
    stored = StoredSpan(
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_span_id=format_span_id(span.parent.span_id) if span.parent is not None else "",
        name=span.name,
        process=str(resource.get(names.SERVICE_NAME, "")),
        pid=int(resource.get(names.PROCESS_PID, 0)),
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        attributes=attributes,
        error_type=str(attributes.get(names.ERROR_TYPE, "")),
        error=(span.status.description or "") if not span.status.is_ok else "",
    )
    return _encoder.encode(stored) + b"\n"
