"""A pool's blocks for readers on other nodes, over links (byte_link.py): threads beside the pool's event loop.

    ReadHeld ─► BlocksReply with the blocks as its body ─► BlocksReply: whether they were held until the last was sent
    ReadTail ─► BlocksReply with the blocks as its body        nobody holds them: the reader knows their checksums

The first one is opened when the first reader asks for it, so that a pool on a single node listens nowhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.block_exports import checksum, host_bytes
from remora.cache_actors.byte_link import Link, LinkAddress, LinkServer, may_link, node_ip
from remora.namespaces.hold_commands import Held
from remora.platform.base.ids import HoldId

logger = logging.getLogger(__name__)

#: Bounds of a request and of a reply's message; what a reader may ask for at once.
MAX_REQUEST_BYTES: Final = 4096
MAX_REPLY_BYTES: Final = 64 * 1024
MAX_BLOCKS: Final = 1024
#: A reader that has not asked for anything for so long connects again.
_IDLE_S: Final = 60.0
_SEND_TIMEOUT_S: Final = 5.0


class ReadHeld(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Consecutive blocks of a hold."""

    hold_id: HoldId
    first: int
    count: int


class ReadTail(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks wherever they lie in the arena."""

    blocks: tuple[int, ...]
    block_bytes: int


ReadRequest = ReadHeld | ReadTail


class BlocksReply(msgspec.Struct, frozen=True, kw_only=True):
    #: Of each block of the body as it lay in the arena; none for a tail.
    checksums: tuple[int, ...] = ()
    #: Why there is no body, or why it is worth nothing; "" otherwise.
    problem: str = ""


class ExportingPool(Protocol):
    """The pool whose blocks are read (cache_actors/durable_pool.py). Asked from threads, and only for what one look
    into a dictionary tells."""

    def held(self, hold_id: HoldId) -> Held: ...


class BlockServer:
    """Of one pool."""

    def __init__(self, pool: ExportingPool, data: NDArray[np.uint8], *, name: str) -> None:
        """`data` is the arena of the pool."""
        self._pool = pool
        self._data = data
        self._name = name
        self._server: LinkServer | None = None
        self._is_refused = not may_link()

    def open(self) -> LinkAddress | None:
        """Where readers connect; None where there are no links."""
        if self._server is None and not self._is_refused:
            try:
                self._server = LinkServer(node_ip(), self.serve, name=f"blocks-{self._name}")
                logger.info("blocks of pool %s are read at %r", self._name, self._server.address)
            except OSError as error:
                self._is_refused = True
                logger.warning("other nodes read blocks of pool %s through Ray: %s", self._name, error)
        return None if self._server is None else self._server.address

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server, self._is_refused = None, True

    def serve(self, link: Link) -> None:
        """Answers a reader until it hangs up, which raises Unavailable."""
        while True:
            data, _ = link.receive(max_message_bytes=MAX_REQUEST_BYTES, timeout_s=_IDLE_S)
            try:
                request = _decoder.decode(data)
            except msgspec.MsgspecError:
                logger.warning("a reader of pool %s does not speak its language", self._name)
                return
            if isinstance(request, ReadHeld):
                self._send_held(link, request)
            else:
                self._send_tail(link, request)

    def _send_held(self, link: Link, request: ReadHeld) -> None:
        held = self._pool.held(request.hold_id)
        first, end = request.first, request.first + request.count
        if not 0 <= first < end <= min(len(held.blocks), first + MAX_BLOCKS):
            _reply(link, BlocksReply(problem="its blocks are not held any more"))
            return
        rows = self._rows(held.blocks[first:end], held.block_bytes)
        _reply(link, BlocksReply(checksums=tuple([checksum(row) for row in rows])), rows)
        is_held = bool(self._pool.held(request.hold_id).blocks)
        _reply(link, BlocksReply(problem="" if is_held else "its blocks were not held until they were sent"))

    def _send_tail(self, link: Link, request: ReadTail) -> None:
        size, blocks = request.block_bytes, request.blocks
        end = len(self._data) // size if size > 0 else 0
        if len(blocks) > MAX_BLOCKS or not all(0 <= block < end for block in blocks):
            _reply(link, BlocksReply(problem="there are no such blocks"))
            return
        _reply(link, BlocksReply(), self._rows(blocks, size))

    def _rows(self, blocks: Sequence[int], size: int) -> list[NDArray[np.uint8]]:
        return [host_bytes(self._data, block * size, (block + 1) * size) for block in blocks]


def _reply(link: Link, reply: BlocksReply, rows: Sequence[NDArray[np.uint8]] = ()) -> None:
    link.send(msgspec.msgpack.encode(reply), *[row.data for row in rows], timeout_s=_SEND_TIMEOUT_S)


_decoder = msgspec.msgpack.Decoder(ReadRequest)
