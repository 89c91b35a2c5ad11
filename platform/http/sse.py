"""Server-sent events, one write for everything that is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remora.platform.http.disconnect import ClientGone, until_disconnect

DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_encoder = msgspec.json.Encoder()


def event(document: Any) -> bytes:
    """One event with a JSON document."""
    return b"data: " + _encoder.encode(document) + b"\n\n"


class EventStream(Response):
    """Sends each chunk of bytes as it comes. `on_end` runs when the stream is over, however it ends."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        on_end: Callable[[BaseException | None], None],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: BaseException | None = None
        try:
            async with until_disconnect(receive):
                await self._send_all(send)
        except ClientGone as gone:
            failure = gone
        except BaseException as error:
            failure = error
            raise
        finally:
            self._on_end(failure)

    async def _send_all(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
