"""A small server that speaks OpenAI's API, and the command line run in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

import pytest

from remora.platform.cli.main import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`run("validate", "file.yaml")` runs the command line; returns exit code and output."""

    def run_main(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["remora", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run_main


class FakeServer:
    """Answers every completion with the same pieces; remembers the bodies it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.pieces = ["A remora ", "is a ", "fish."]
        self.documents: dict[str, Any] = {"/v1/models": {"data": [{"id": "tiny"}, {"id": "other"}]}}
        self.error: tuple[int, str] | None = None
        self.error_in_stream: str | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path in fake.documents:
                    self._answer(200, fake.documents[self.path])
                else:
                    self._answer(404, {"error": {"message": f"nothing at {self.path}"}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.bodies.append(body)
                if self.path in fake.documents:
                    self._answer(200, fake.documents[self.path])
                elif fake.error is not None:
                    self._answer(fake.error[0], {"error": {"message": fake.error[1]}})
                else:
                    self._stream(body, chat=self.path.endswith("/chat/completions"))

            def _stream(self, body: dict[str, Any], *, chat: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                for piece in fake.pieces:
                    self._event({"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]})
                if fake.error_in_stream:
                    self._event({"error": {"message": fake.error_in_stream}})
                self._event({"choices": [], "usage": {"completion_tokens": body.get("max_tokens", 0)}})
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, event: dict[str, Any]) -> None:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()

            def _answer(self, status: int, document: Any) -> None:
                content = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()
