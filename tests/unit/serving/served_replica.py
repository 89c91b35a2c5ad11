"""A fake replica as Serve shows it: bytes in, bytes out, streams that can be cancelled, and links to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fake_replica import FakeReplica

from remora.deployments.engine.messages import FreezeOrder, GenerationRequest, Resumption
from remora.deployments.router_links import RouterLinks
from remora.platform.base.ids import ReplicaId, RequestId, RouterId


class _Calls:
    """RouterCalls of a fake."""

    def __init__(self, replica: FakeReplica) -> None:
        self._replica = replica

    async def submit(self, data: bytes) -> bytes:
        await self._replica.submit(msgspec.msgpack.decode(data, type=list[GenerationRequest]))
        return b""

    async def freeze(self, data: bytes) -> bytes:
        await self._replica.freeze(msgspec.msgpack.decode(data, type=list[FreezeOrder]))
        return b""

    async def resume(self, data: bytes) -> bytes:
        await self._replica.resume(msgspec.msgpack.decode(data, type=list[Resumption]))
        return b""

    async def cancel(self, data: bytes) -> bytes:
        await self._replica.cancel(msgspec.msgpack.decode(data, type=list[RequestId]))
        return b""

    async def keep_alive(self, router_id: str, wanted_traces: str = "") -> bytes:
        await self._replica.keep_alive(RouterId(router_id), wanted_traces.split())
        return b""


class ServedReplica:
    """Stands for the Serve handle, and for the process behind it."""

    def __init__(self, replica: FakeReplica, *, has_links: bool = True) -> None:
        self.replica = replica
        self.calls = _Calls(replica)
        self.links = RouterLinks(ReplicaId(replica.replica_id), replica.hub, self.calls)
        self.has_links = has_links
        #: Methods that were called through Serve.
        self.served: list[str] = []

    def options(self, *, stream: bool) -> _Streams:
        return _Streams(self)

    def __getattr__(self, method: str) -> Any:
        served = self

        class Method:
            def remote(self, *arguments: Any, target: str) -> asyncio.Task[bytes]:
                served.served.append(method)
                return asyncio.ensure_future(served.answer(method, arguments))

        return Method()

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> bytes:
        if method == "describe":
            return msgspec.msgpack.encode(await self.replica.describe())
        if method == "open_links":
            return msgspec.msgpack.encode(self.links.open() if self.has_links else None)
        answer: bytes = await getattr(self.calls, method)(*arguments)
        return answer

    def break_links(self) -> None:
        """As if something between the two processes had cut the connections."""
        for peer in list(self.links.peers.values()):
            assert peer.link._transport is not None
            peer.link._transport.abort()

    async def feed(self, router_id: str) -> AsyncIterator[bytes]:
        async for message in self.replica.feed(RouterId(router_id)):
            yield msgspec.msgpack.encode(message)


class _Streams:
    """The handle's streaming calls."""

    def __init__(self, served: ServedReplica) -> None:
        self._served = served

    def __getattr__(self, method: str) -> Any:
        served = self._served

        class Method:
            def remote(self, router_id: str, *, target: str) -> _Stream:
                served.served.append(method)
                if method == "carry_feed":
                    return _Stream(served.links.carry(RouterId(router_id)))
                return _Stream(served.feed(router_id))

        return Method()


class _Stream:
    """What a streaming call returns: its generator runs on the replica's side, and ends soon after `cancel`."""

    def __init__(self, generator: Any) -> None:
        self._items: asyncio.Queue[bytes | BaseException] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(generator))

    async def _run(self, generator: Any) -> None:
        try:
            async for item in generator:
                self._items.put_nowait(item)
            self._items.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._items.put_nowait(error)
        finally:
            await generator.aclose()

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> bytes:
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self._task.cancel()
