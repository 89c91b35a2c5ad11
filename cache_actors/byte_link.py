"""Bytes between processes of different nodes, over TCP beside Ray: blocks of KV, hidden states.

    server = LinkServer(node_ip(), serve)      # serve(link) runs in a thread for each peer
    server.address ──► handed to the peer in a Ray call, never written anywhere ──► link = connect(address)
    link.send(message, body, timeout_s=5)      # a message and bytes straight out of memory
    message, num_bytes = link.receive(max_message_bytes=4096, max_body_bytes=size, timeout_s=5)
    link.receive_body(into, timeout_s=5)       # straight into memory

Each side proves that it knows the server's secret before anything else is read (HMAC-SHA256 over random numbers of
both); the secret itself does not cross. What is announced larger than the receiver allows ends the link. Nothing is
unpickled, and nothing encrypted: where Ray is told to encrypt (RAY_USE_TLS) there are no links.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec
import ray

from remora.platform.base.errors import Unavailable

logger = logging.getLogger(__name__)

#: Peers that a server has at once; more are turned away.
MAX_LINKS: Final = 64
CONNECT_TIMEOUT_S: Final = 1.0
_HANDSHAKE_TIMEOUT_S: Final = 3.0
_GREETING: Final = b"remora link 1\n"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
#: Bytes of the message, bytes of the body.
_HEADER: Final = struct.Struct("!IQ")
#: Seconds of silence, seconds between two questions then, and how many may stay without an answer.
_KEEPALIVE_OPTIONS: Final = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
_KEEPALIVE: Final = (15, 5, 3)
_TIMEVAL: Final = struct.Struct("@ll")

Buffer = bytes | bytearray | memoryview


class LinkAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens, and what a peer must know. Only for Ray calls: whoever has it may connect."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"LinkAddress({self.host}:{self.port})"


def node_ip() -> str:
    """The address by which other nodes reach this one. Ray must be initialised."""
    address: str = ray.util.get_node_ip_address()
    return address


def may_link() -> bool:
    """False where Ray encrypts what crosses between nodes: plain links would undo that."""
    return os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


class Link:
    """One connection. Methods raise Unavailable when the peer is gone, is too slow or breaks the rules; the link is of
    no use then. One thread sends and one receives at most."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that says nothing for long may be idle, or have lost its node.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in zip(_KEEPALIVE_OPTIONS, _KEEPALIVE, strict=True):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connected
        self._num_body_bytes = 0
        self._is_broken = False

    def send(self, message: Buffer, *body: memoryview, timeout_s: float) -> None:
        """Sends a message with a body out of contiguous parts, which may change as soon as it returns."""
        deadline_s = time.monotonic() + timeout_s
        parts = [part.cast("B") for part in body]
        header = _HEADER.pack(len(message), sum(len(part) for part in parts))
        self._send([memoryview(header + bytes(message)), *parts], deadline_s)

    def receive(self, *, max_message_bytes: int, max_body_bytes: int = 0, timeout_s: float) -> tuple[bytes, int]:
        """The next message, and how many bytes of its body have to be taken before the next one."""
        if self._num_body_bytes:
            raise self._broken("a body was not taken from the link")
        deadline_s = time.monotonic() + timeout_s
        num_message_bytes, num_body_bytes = _HEADER.unpack(self._take(_HEADER.size, deadline_s))
        if num_message_bytes > max_message_bytes or num_body_bytes > max_body_bytes:
            raise self._broken(f"the peer wants to send {num_message_bytes} + {num_body_bytes} bytes: too many")
        self._num_body_bytes = num_body_bytes
        return self._take(num_message_bytes, deadline_s), num_body_bytes

    def receive_body(self, into: memoryview, *, timeout_s: float) -> None:
        """The next bytes of the body, as many as `into` holds."""
        into = into.cast("B")
        if len(into) > self._num_body_bytes:
            raise self._broken(f"the peer sends {self._num_body_bytes} bytes, not {len(into)}")
        self._num_body_bytes -= len(into)
        self._receive(into, time.monotonic() + timeout_s)

    def is_usable(self) -> bool:
        """Whether everything has gone well so far and the peer, which is not to say anything now, has not hung up."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self._num_body_bytes and not self._is_broken
        except OSError:
            return False
        return False

    def detach(self) -> socket.socket:
        """The connection, for whoever goes on with it; the link is of no use then, and closing it changes nothing."""
        return socket.socket(fileno=self._socket.detach())

    def close(self) -> None:
        """Also wakes a thread that waits for the peer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, parts: list[memoryview], deadline_s: float) -> None:
        while parts:
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            try:
                num_sent = self._socket.sendmsg(parts[:64])
            except OSError as error:
                raise self._gone(error) from None
            while parts and num_sent >= len(parts[0]):
                num_sent -= len(parts.pop(0))
            if num_sent:
                parts[0] = parts[0][num_sent:]

    def _take(self, num_bytes: int, deadline_s: float) -> bytes:
        taken = bytearray(num_bytes)
        self._receive(memoryview(taken), deadline_s)
        return bytes(taken)

    def _receive(self, into: memoryview, deadline_s: float) -> None:
        while len(into):
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            try:
                num_bytes = self._socket.recv_into(into, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise self._gone(error) from None
            if not num_bytes:
                raise self._broken("the peer has closed the link")
            into = into[num_bytes:]

    def _limit(self, option: int, deadline_s: float) -> None:
        """The kernel waits, so that a large body costs one call and not one for each of its packets."""
        left_us = int((deadline_s - time.monotonic()) * 1e6)
        if left_us <= 0:
            raise self._broken("the peer is too slow")
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))
        except OSError as error:
            raise self._gone(error) from None

    def _gone(self, error: OSError) -> Unavailable:
        is_late = isinstance(error, BlockingIOError)
        return self._broken("the peer is too slow" if is_late else f"the link is broken: {error.strerror or error}")

    def _broken(self, problem: str) -> Unavailable:
        self._is_broken = True
        return Unavailable(problem)

    # ---- handshake ---------------------------------------------------------------------------------------------------

    def _prove_to_client(self, secret: bytes) -> None:
        """The server's part. Raises Unavailable when the client does not know the secret."""
        deadline_s = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        own = _GREETING + secrets.token_bytes(_NONCE_BYTES)
        self._send([memoryview(own)], deadline_s)
        other = self._take(len(own), deadline_s)
        proof = self._take(_PROOF_BYTES, deadline_s)
        if not hmac.compare_digest(proof, _proof(secret, b"client", own, other)):
            raise Unavailable("the peer does not know the secret")
        self._send([memoryview(_proof(secret, b"server", own, other))], deadline_s)

    def _prove_to_server(self, secret: bytes, deadline_s: float) -> None:
        """The client's part. Raises Unavailable when the server does not know the secret, or is another program."""
        own = _GREETING + secrets.token_bytes(_NONCE_BYTES)
        other = self._take(len(own), deadline_s)
        if not other.startswith(_GREETING):
            raise Unavailable("the peer is no link server")
        self._send([memoryview(own + _proof(secret, b"client", other, own))], deadline_s)
        if not hmac.compare_digest(self._take(_PROOF_BYTES, deadline_s), _proof(secret, b"server", other, own)):
            raise Unavailable("the peer does not know the secret")


def connect(address: LinkAddress, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Link:
    """Raises Unavailable when the server cannot be reached in time, or either side does not know the secret."""
    deadline_s = time.monotonic() + timeout_s
    try:
        connected = socket.create_connection((address.host, address.port), timeout_s)
    except OSError as error:
        raise Unavailable(f"{address.host}:{address.port} cannot be reached: {error.strerror or error}") from None
    link = Link(connected)
    try:
        link._prove_to_server(address.secret, deadline_s)
    except Unavailable:
        link.close()
        raise
    return link


class LinkServer:
    """Listens on one address of this node, on a port that the system chooses."""

    def __init__(self, host: str, serve: Callable[[Link], None], *, name: str) -> None:
        """`serve` runs in a thread of its own for each peer; the link ends when it returns or raises Unavailable.
        Raises OSError when there is no such address."""
        self._serve = serve
        self._name = name
        self._listening = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=MAX_LINKS
        )
        self.address = LinkAddress(
            host=host, port=self._listening.getsockname()[1], secret=secrets.token_bytes(_PROOF_BYTES)
        )
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """Ends all links; their threads end soon."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.1)  # no descriptor is free now
                continue
            link = Link(connected)
            with self._lock:
                is_welcome = len(self._links) < MAX_LINKS and self._listening.fileno() >= 0
                if is_welcome:
                    self._links.add(link)
            if is_welcome:
                threading.Thread(target=self._run, args=(link,), name=self._name, daemon=True).start()
            else:
                link.close()

    def _run(self, link: Link) -> None:
        try:
            link._prove_to_client(self.address.secret)
            self._serve(link)
        except Unavailable as error:
            logger.debug("a link of %s has ended: %s", self._name, error)
        except Exception:
            logger.exception("a link of %s failed", self._name)
        finally:
            link.close()
            with self._lock:
                self._links.discard(link)


def _proof(secret: bytes, role: bytes, server_greeting: bytes, client_greeting: bytes) -> bytes:
    return hmac.digest(secret, role + server_greeting + client_greeting, "sha256")
