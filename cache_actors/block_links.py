"""Blocks of a pool of another node over links to it (block_server.py), seen by whoever reads them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.block_server import MAX_REPLY_BYTES, BlocksReply, ReadHeld, ReadRequest, ReadTail
from remora.cache_actors.byte_link import CONNECT_TIMEOUT_S, Link, LinkAddress, connect
from remora.namespaces.hold_commands import Held
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import HoldId

logger = logging.getLogger(__name__)

#: A pool that cannot be linked to is read through Ray for so long.
_RETRY_S: Final = 30.0
#: Longest that one piece may take on its way.
READ_TIMEOUT_S: Final = 5.0
#: Links that are kept for the next reader.
_MAX_IDLE: Final = 4


class PoolLinks:
    """Links of this process to one pool. Thread-safe."""

    def __init__(self, pool_name: str, ask_address: Callable[[], LinkAddress | None]) -> None:
        """`ask_address` asks the pool where it is read; raises Unavailable when it does not answer."""
        self._pool_name = pool_name
        self._ask_address = ask_address
        self._lock = threading.Lock()
        self._address: LinkAddress | None = None
        self._idle: deque[Link] = deque()
        self._silent_until_s = 0.0

    def take(self, *, timeout_s: float = CONNECT_TIMEOUT_S, may_ask: bool = True) -> Link | None:
        """A link that nobody else has; None where there is none. Without `may_ask` only if that is soon known."""
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if link.is_usable():
                return link
            link.close()
        if time.monotonic() < self._silent_until_s:
            return None
        try:
            return self._connect(timeout_s, may_ask)
        except Unavailable as error:
            with self._lock:
                self._address = None
                self._silent_until_s = time.monotonic() + _RETRY_S
            logger.warning("blocks of %s come through Ray: %s", self._pool_name, error)
            return None

    def _connect(self, timeout_s: float, may_ask: bool) -> Link | None:
        with self._lock:
            known = self._address
        if known is not None:
            try:
                return connect(known, timeout_s=timeout_s)
            except Unavailable:  # perhaps the pool has restarted, and listens elsewhere
                if not may_ask:
                    raise
        if not may_ask:
            return None
        asked = self._ask_address()
        if asked is None:
            raise Unavailable("it has no links")
        with self._lock:
            self._address = asked
        return connect(asked, timeout_s=timeout_s)

    def give_back(self, link: Link) -> None:
        """The link has nothing on its way."""
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(link)
        else:
            link.close()

    def prepare(self) -> None:
        """Has a link ready, so that the next reader need not wait for one."""
        link = self.take()
        if link is not None:
            self.give_back(link)

    def read_tail(self, blocks: Sequence[int], block_bytes: int, *, timeout_s: float) -> Iterator[NDArray[np.uint8]]:
        """Blocks wherever they lie, one after the other in the same memory; nothing without a link that is ready.
        Raises Unavailable when they do not come in time."""
        deadline_s = time.monotonic() + timeout_s
        link = self.take(timeout_s=timeout_s, may_ask=False)
        if link is None:
            return
        buffer = np.empty(block_bytes, np.uint8)
        is_whole = False
        try:
            _ask(link, ReadTail(blocks=tuple(blocks), block_bytes=block_bytes), deadline_s)
            _take_reply(link, len(blocks) * block_bytes, deadline_s)
            for _ in blocks:
                link.receive_body(buffer.data, timeout_s=deadline_s - time.monotonic())
                yield buffer
            is_whole = True
        finally:
            if is_whole:
                self.give_back(link)
            else:
                link.close()


class LinkedBlocks:
    """Blocks that are held for this reader (block_loader.HeldReader), one piece ahead of what is read."""

    path: Final = "linked"

    def __init__(self, links: PoolLinks, link: Link, hold_id: HoldId, held: Held, let_go: Callable[[], None]) -> None:
        """`link` was taken from `links` and goes back to them."""
        self._links = links
        self._link = link
        self._hold_id = hold_id
        self._held = held
        self._let_go = let_go
        self._ahead: tuple[int, int] | None = None
        self._is_sound = True

    @property
    def num_blocks(self) -> int:
        return len(self._held.blocks)

    @property
    def block_bytes(self) -> int:
        return self._held.block_bytes

    def read(self, first: int, into_NB: NDArray[np.uint8]) -> tuple[int, ...]:
        """Pieces must be asked for in order. Raises Unavailable also when the link breaks."""
        count, deadline_s = len(into_NB), time.monotonic() + READ_TIMEOUT_S
        self._is_sound = False
        if self._ahead is None:
            self._ask(first, count, deadline_s)
        elif self._ahead != (first, count):
            raise Unavailable("its blocks are not read in order")
        self._ahead = None
        after = min(count, self.num_blocks - first - count)
        if after > 0:
            self._ask(first + count, after, deadline_s)
            self._ahead = (first + count, after)
        checksums = _take_reply(self._link, into_NB.nbytes, deadline_s).checksums
        self._link.receive_body(into_NB.reshape(-1).data, timeout_s=deadline_s - time.monotonic())
        _take_reply(self._link, 0, deadline_s)
        self._is_sound = True
        return checksums

    def _ask(self, first: int, count: int, deadline_s: float) -> None:
        _ask(self._link, ReadHeld(hold_id=self._hold_id, first=first, count=count), deadline_s)

    def close(self) -> None:
        if self._is_sound and self._ahead is None:
            self._links.give_back(self._link)
        else:
            self._link.close()
        self._let_go()


def _ask(link: Link, request: ReadRequest, deadline_s: float) -> None:
    link.send(msgspec.msgpack.encode(request), timeout_s=deadline_s - time.monotonic())


def _take_reply(link: Link, num_body_bytes: int, deadline_s: float) -> BlocksReply:
    """A reply with a body of that size, which is still to be taken."""
    data, num_bytes = link.receive(
        max_message_bytes=MAX_REPLY_BYTES, max_body_bytes=num_body_bytes, timeout_s=deadline_s - time.monotonic()
    )
    try:
        reply = msgspec.msgpack.decode(data, type=BlocksReply)
    except msgspec.MsgspecError:
        raise Unavailable("the pool does not speak the reader's language") from None
    if reply.problem or num_bytes != num_body_bytes:
        raise Unavailable(reply.problem or f"{num_bytes} bytes came, not {num_body_bytes}")
    return reply
