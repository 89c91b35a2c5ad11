"""A ReplicaLink over a Ray Serve handle."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc  # type: ignore[import-untyped]
import msgspec
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from remora.deployments.engine.messages import FeedMessage, FreezeOrder, GenerationRequest, Resumption
from remora.deployments.model_card import ModelCard
from remora.deployments.targeting import TARGET
from remora.namespaces.geometry import KVPrecision
from remora.namespaces.quantise_commands import Quantise
from remora.platform.base.errors import RemoraError, Unavailable
from remora.platform.base.ids import NamespaceId, ReplicaId, RequestId, RouterId

Result = TypeVar("Result")

_encoder = msgspec.msgpack.Encoder()
decode_feed = msgspec.msgpack.Decoder(FeedMessage).decode
_card_decoder = msgspec.msgpack.Decoder(ModelCard)


class ServeLink:
    """Calls to one replica of one model's deployment. Bodies are msgpack, so that Serve pickles only bytes."""

    def __init__(self, handle: Any, replica_id: ReplicaId) -> None:
        self._handle = handle
        self._feed_handle = handle.options(stream=True)
        self._target = {TARGET: replica_id}

    async def describe(self) -> ModelCard:
        return _card_decoder.decode(await self._call("describe"))

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        await self._call("submit", _encoder.encode(list(requests)))

    async def freeze(self, orders: Sequence[FreezeOrder]) -> None:
        await self._call("freeze", _encoder.encode(list(orders)))

    async def resume(self, resumptions: Sequence[Resumption]) -> None:
        await self._call("resume", _encoder.encode(list(resumptions)))

    async def cancel(self, request_ids: Sequence[RequestId]) -> None:
        await self._call("cancel", _encoder.encode(list(request_ids)))

    async def keep_alive(self, router_id: RouterId, wanted_traces: Sequence[str] = ()) -> None:
        await self._call("keep_alive", router_id, " ".join(wanted_traces))

    async def drain(self, draining: bool) -> None:
        await self._call("drain", draining)

    async def prepare_precision(self, namespace_id: NamespaceId, kv_precision: KVPrecision) -> None:
        await self._call("prepare_precision", namespace_id, *kv_precision)

    async def refresh_namespaces(self) -> None:
        await self._call("refresh_namespaces")

    async def quantise_command(self, namespace_id: NamespaceId) -> Quantise:
        return msgspec.msgpack.decode(await self._call("quantise_command", namespace_id), type=Quantise)

    async def stats(self) -> dict[str, Any]:
        return dict(msgspec.msgpack.decode(await self._call("stats")))

    async def feed(self, router_id: RouterId) -> AsyncGenerator[FeedMessage, None]:
        async with aclosing(self._stream("feed", router_id)) as messages:
            async for message in messages:
                yield decode_feed(message)

    async def _stream(self, method: str, *arguments: str) -> AsyncGenerator[bytes, None]:
        with _as_unavailable():
            messages = _outside_request(lambda: getattr(self._feed_handle, method).remote(*arguments, **self._target))
            try:
                async for message in messages:
                    yield message
            finally:
                messages.cancel()

    async def _call(self, method: str, *arguments: bytes | str | bool) -> bytes:
        with _as_unavailable():
            response = _outside_request(lambda: getattr(self._handle, method).remote(*arguments, **self._target))
            try:
                return bytes(await response)
            except asyncio.CancelledError:
                response.cancel()
                raise


def _outside_request(call: Callable[[], Result]) -> Result:
    """Makes the call outside of any HTTP request's context.

    Serve files calls under the HTTP request in whose context they are made: it cancels them with it, and mixes up two
    calls that share one. Calls to replicas serve many requests.
    """
    return contextvars.Context().run(call)


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Whatever means that the replica cannot be reached, as the one error that callers act upon."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RemoraError):
            raise cause from None
        raise
    except (RayError, RayServeException, grpc.RpcError, ConnectionError) as error:
        raise Unavailable(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from None
