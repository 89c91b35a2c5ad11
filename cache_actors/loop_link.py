"""Messages between the event loops of two processes: the connections of byte_link.py without threads.

    server = LoopLinkServer(accept, name="calls of cpu0")      # accept() makes the LoopLink for each peer
    server.open() ──► handed to the peer in a Ray call ──► link = await connect_link(address, LoopLink(...))
    answer = await link.ask(topic, data)     # what the other side's `answer` returns, or the RemoraError it raises
    link.tell(topic, data)                   # to the other side's `hear`; nothing comes back

For what a token passes: a Ray call takes 2 to 3 ms between two processes of one node, a message over a link 0.2. Topics
are numbers that both sides know. A link that breaks says so once (`on_end`): whatever was not answered may or may not
have been done.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from enum import IntEnum
from functools import partial
from typing import Final, cast

import msgspec

from remora.cache_actors.byte_link import MAX_LINKS, Link, LinkAddress, LinkServer, connect, may_link, node_ip
from remora.platform.base.errors import RemoraError, Unavailable, named_error

logger = logging.getLogger(__name__)

#: Of one message; a peer that announces more is no peer of ours.
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
#: Longest that what was sent may stay without a sign that it came, before the link counts as broken: TCP by itself
#: tries for a quarter of an hour to reach a node that is gone.
_MAX_UNSEEN_MS: Final = 15_000
#: What may wait to be sent before `drain` waits.
_MAX_UNSENT_BYTES: Final = 1024 * 1024
#: Bytes of what follows, kind, topic, number of the question.
_HEADER: Final = struct.Struct("!IBBI")


class _Kind(IntEnum):
    TOLD = 0
    ASKED = 1
    ANSWERED = 2
    REFUSED = 3


class _Refusal(msgspec.Struct, frozen=True):
    """A RemoraError on its way."""

    error: str
    message: str
    field: str | None
    retry_after_s: float


Answer = Callable[[int, bytes], Awaitable[bytes]]
Hear = Callable[[int, bytes], None]


async def _answer_nothing(topic: int, data: bytes) -> bytes:
    raise Unavailable("nobody answers here")


class LoopLink(asyncio.Protocol):
    """One side. All methods and callbacks run on the event loop that it was connected on."""

    def __init__(
        self,
        *,
        answer: Answer = _answer_nothing,
        hear: Hear = lambda topic, data: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`answer` is awaited for each question, several at once, begun in the order of the questions."""
        self._answer = answer
        self._hear = hear
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._next_no = 0
        self._answering: set[asyncio.Task[None]] = set()
        self.has_ended = False
        self._may_write = asyncio.Event()
        self._may_write.set()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, topic: int, data: bytes) -> bytes:
        """Raises the RemoraError with which the other side answers; Unavailable when the link is or gets broken."""
        number = self._next_no
        self._next_no = (number + 1) % 2**32
        self._send(_Kind.ASKED, topic, number, data)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            return await answer
        finally:
            self._questions.pop(number, None)

    def tell(self, topic: int, data: bytes) -> None:
        """Raises Unavailable when the link is broken; that it is sent does not mean that it arrives."""
        self._send(_Kind.TOLD, topic, 0, data)

    async def drain(self) -> None:
        """Waits while the other side is slow to read."""
        await self._may_write.wait()

    def close(self) -> None:
        """What was said before still arrives. May be called twice."""
        if self._transport is not None:
            self._transport.close()

    def _send(self, kind: _Kind, topic: int, number: int, data: bytes) -> None:
        if not self.is_open:
            raise Unavailable("the link is broken")
        if len(data) > MAX_MESSAGE_BYTES:
            raise Unavailable(f"a message of {len(data)} bytes is too large for a link")
        assert self._transport is not None, "it is open"
        self._transport.write(_HEADER.pack(len(data), kind, topic, number) + data)

    # ---- the loop says -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_MAX_UNSENT_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.has_ended = True
        self._may_write.set()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(Unavailable(f"the link is broken: {exc or 'the other side has closed it'}"))
        self._on_end()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start = 0
        while len(received) - start >= _HEADER.size:
            num_bytes, kind, topic, number = _HEADER.unpack_from(received, start)
            if num_bytes > MAX_MESSAGE_BYTES or kind > _Kind.REFUSED:
                logger.warning("a peer does not speak the language of links")
                received.clear()
                if self._transport is not None:
                    self._transport.abort()
                return
            end = start + _HEADER.size + num_bytes
            if len(received) < end:
                break
            self._take(_Kind(kind), topic, number, bytes(received[start + _HEADER.size : end]))
            start = end
        del received[:start]

    def _take(self, kind: _Kind, topic: int, number: int, data: bytes) -> None:
        if kind is _Kind.TOLD:
            self._hear(topic, data)
        elif kind is _Kind.ASKED:
            task = asyncio.get_running_loop().create_task(self._reply(topic, number, data))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif (answer := self._questions.get(number)) is not None and not answer.done():
            if kind is _Kind.ANSWERED:
                answer.set_result(data)
            else:
                answer.set_exception(_error_of(data))

    async def _reply(self, topic: int, number: int, data: bytes) -> None:
        kind = _Kind.ANSWERED
        try:
            answer = await self._answer(topic, data)
        except RemoraError as error:
            kind, answer = _Kind.REFUSED, _refusal(error)
        except Exception as error:
            logger.exception("a question over a link could not be answered")
            kind, answer = _Kind.REFUSED, _refusal(RemoraError(f"{type(error).__name__}: {error}"))
        if len(answer) > MAX_MESSAGE_BYTES:
            kind, answer = _Kind.REFUSED, _refusal(RemoraError(f"an answer of {len(answer)} bytes is too large"))
        if self.is_open:
            self._send(kind, topic, number, answer)


def _refusal(error: RemoraError) -> bytes:
    return msgspec.msgpack.encode(
        _Refusal(
            type(error).__name__, str(error), error.field, 1.0 if error.retry_after_s is None else error.retry_after_s
        )
    )


def _error_of(data: bytes) -> RemoraError:
    try:
        refusal = msgspec.msgpack.decode(data, type=_Refusal)
    except msgspec.MsgspecError:
        return Unavailable("the other side does not speak the language of links")
    return named_error(refusal.error, refusal.message, field=refusal.field, retry_after_s=refusal.retry_after_s)


async def connect_link(address: LinkAddress, link: LoopLink) -> None:
    """Raises Unavailable when the server cannot be reached in time, or either side does not know the secret."""
    connected = _watched((await asyncio.to_thread(connect, address)).detach())
    await asyncio.get_running_loop().create_connection(lambda: link, sock=connected)


def _watched(connected: socket.socket) -> socket.socket:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _MAX_UNSEEN_MS)
    return connected


class LoopLinkServer:
    """Listens on an address of this node from when it is first asked where; what peers say is heard on the event loop
    that asks."""

    def __init__(self, accept: Callable[[], LoopLink], *, name: str) -> None:
        """`accept` makes this side of the link to a peer that has proven itself."""
        self._accept = accept
        self._name = name
        self._links: list[LoopLink] = []
        self._server: LinkServer | None = None
        self._is_refused = not may_link()

    def open(self) -> LinkAddress | None:
        """Where peers connect; None where there are no links."""
        if self._server is None and not self._is_refused:
            hand_over = partial(self._hand_over, asyncio.get_running_loop())
            try:
                self._server = LinkServer(node_ip(), hand_over, name=self._name)
            except OSError as error:
                self._is_refused = True
                logger.warning("%s go through Ray: %s", self._name, error)
        return None if self._server is None else self._server.address

    def close(self) -> None:
        """Ends all links; there are no others then."""
        if self._server is not None:
            self._server.close()
        self._server, self._is_refused = None, True
        for link in self._links:
            link.close()

    def _hand_over(self, loop: asyncio.AbstractEventLoop, link: Link) -> None:
        """Called in a thread."""
        asyncio.run_coroutine_threadsafe(self._adopt(_watched(link.detach())), loop).result()

    async def _adopt(self, connected: socket.socket) -> None:
        self._links = [link for link in self._links if not link.has_ended]
        if len(self._links) >= MAX_LINKS or self._server is None:
            connected.close()
            return
        link = self._accept()
        self._links.append(link)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: link, connected)
        if self._server is None:
            link.close()
