"""The hop between two stages on different nodes: a link (byte_link.py), one for each hop and direction.

    LinkSender ─ TCP ─► thread of LinkReceiver ─► Ring in its own memory ─► who computes

The thread takes what comes off the network while the stage computes, as much as the ring has room for; then the
sender's kernel, and at last the sender itself, wait. Whoever closes or dies ends the connection, which the other side
notices at once; a node that falls silent is noticed by the link's keep-alive after half a minute.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import numpy as np

from remora.cache_actors.byte_link import Link, LinkAddress, LinkServer, connect
from remora.deployments.pipeline.channel import Bytes
from remora.deployments.pipeline.ring import Ring
from remora.platform.base.errors import StageLost, Unavailable

#: Longer than any pipeline is idle: how long to wait for a message is up to who reads.
_FOR_EVER_S: Final = 1e8


class LinkSender:
    """channel.HopSender."""

    def __init__(self, address: LinkAddress) -> None:
        """Raises StageLost when the other side is not there or does not know the secret."""
        self._name = f"{address.host}:{address.port}"
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._num_bytes = 0
        self._deadline_s = 0.0
        try:
            self._link = connect(address)
        except Unavailable as error:
            raise StageLost(f"a stage cannot be reached: {error}") from None

    def reserve(self, num_bytes: int, deadline_s: float) -> Bytes:
        """Where to write the next message; there is always room."""
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(num_bytes, np.uint8)
        self._num_bytes, self._deadline_s = num_bytes, deadline_s
        return self._buffer[:num_bytes]

    def commit(self) -> None:
        """Hands it to the network. Raises StageLost when the reader is gone, or takes nothing until the deadline."""
        try:
            self._link.send(b"", self._buffer[: self._num_bytes].data, timeout_s=self._deadline_s - time.monotonic())
        except Unavailable as error:
            raise StageLost(f"{self._name}: {error}") from None

    def close(self) -> None:
        self._link.close()


class LinkReceiver:
    """channel.HopReceiver."""

    def __init__(self, host: str, *, max_message_bytes: int, num_messages: int) -> None:
        """Listens on an address of this node. Raises StageLost when it is none."""
        self._writer, self._reader = Ring.private(host, max_message_bytes=max_message_bytes, num_messages=num_messages)
        self._max_message_bytes = max_message_bytes
        self._end = ""
        self._is_taken = threading.Lock()
        try:
            self._server = LinkServer(host, self._serve, name="stage-hop")
        except OSError as error:
            raise StageLost(f"{host}: no channel of a pipeline can be opened there: {error.strerror}") from None

    @property
    def address(self) -> LinkAddress:
        """For the one sender."""
        return self._server.address

    @property
    def capacity(self) -> int:
        return self._reader.capacity

    def has_message(self) -> bool:
        return self._reader.has_message()

    def peek(self, deadline_s: float) -> Bytes:
        """See HopReceiver."""
        try:
            return self._reader.peek(deadline_s)
        except StageLost as lost:
            raise StageLost(f"{lost} ({self._end})" if self._end else str(lost)) from None

    def release(self) -> None:
        self._reader.release()

    def close(self) -> None:
        self._reader.close()
        self._server.close()

    def _serve(self, link: Link) -> None:
        """In the link's thread."""
        if not self._is_taken.acquire(blocking=False):
            return  # one writer only
        try:
            while True:
                _, num_bytes = link.receive(
                    max_message_bytes=0, max_body_bytes=self._max_message_bytes, timeout_s=_FOR_EVER_S
                )
                link.receive_body(
                    self._writer.reserve(num_bytes, time.monotonic() + _FOR_EVER_S).data, timeout_s=_FOR_EVER_S
                )
                self._writer.commit()
        except (Unavailable, StageLost) as error:
            self._end = str(error)
        finally:
            self._writer.close()
