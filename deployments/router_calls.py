"""What routers say to a replica about their requests, however it comes: as a Serve call, or over a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from remora.deployments.engine.engine import Engine
from remora.deployments.engine.messages import FreezeOrder, GenerationRequest, Resumption
from remora.deployments.feed import FeedHub
from remora.deployments.namespace_formats import NamespaceFormats
from remora.platform.base.ids import RequestId, RouterId
from remora.platform.base.telemetry import keep_traces

_requests_decoder = msgspec.msgpack.Decoder(list[GenerationRequest])
_freezes_decoder = msgspec.msgpack.Decoder(list[FreezeOrder])
_resumptions_decoder = msgspec.msgpack.Decoder(list[Resumption])
_ids_decoder = msgspec.msgpack.Decoder(list[RequestId])


class RouterCalls:
    """All of them answer nothing."""

    def __init__(
        self, hub: FeedHub, engine: Engine, formats: NamespaceFormats, *, on_submitted: Callable[[], None]
    ) -> None:
        self._hub = hub
        self._engine = engine
        self._formats = formats
        self._on_submitted = on_submitted

    async def submit(self, data: bytes) -> bytes:
        """Takes a list of GenerationRequest. Raises Unavailable for a router without an open feed."""
        requests = _requests_decoder.decode(data)
        if any(request.num_kept_tokens for request in requests):
            await self._formats.look_for_siblings()
        for request in requests:
            self._hub.take(request)
            self._engine.submit(request)
        self._on_submitted()
        return b""

    async def freeze(self, data: bytes) -> bytes:
        """Stops what a list of FreezeOrder names; each handover comes over the feed. Unknown ones are ignored."""
        for order in _freezes_decoder.decode(data):
            self._engine.freeze(order)
        return b""

    async def resume(self, data: bytes) -> bytes:
        """Lets standbys go on: a list of Resumption. Unknown ones are ignored."""
        for resumption in _resumptions_decoder.decode(data):
            self._engine.resume(resumption)
        return b""

    async def cancel(self, data: bytes) -> bytes:
        """Stops a list of RequestId; unknown ones are ignored."""
        request_ids = _ids_decoder.decode(data)
        for request_id in request_ids:
            self._hub.drop(request_id)
        self.cancel_all(request_ids)
        return b""

    async def keep_alive(self, router_id: str, wanted_traces: str = "") -> bytes:
        """The router is there, and wants its feed; it keeps these traces, with spaces between them."""
        self._hub.hear(RouterId(router_id))
        keep_traces(wanted_traces.split())
        return b""

    def cancel_all(self, request_ids: Sequence[RequestId]) -> None:
        """Nobody waits for these any more."""
        for request_id in request_ids:
            self._engine.cancel(request_id)
