"""Links between processes: whole messages from whom they are meant for, and nothing from anybody else."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from remora.cache_actors import byte_link
from remora.cache_actors.byte_link import Link, LinkAddress, LinkServer, connect
from remora.platform.base.errors import Unavailable

LIMITS = {"max_message_bytes": 64, "max_body_bytes": 4 << 20, "timeout_s": 5.0}
#: Magic and random numbers; then the proof.
GREETING_BYTES, PROOF_BYTES = len(byte_link._GREETING) + 32, 32


class Echo:
    """Sends back what comes, and keeps why a link has ended."""

    def __init__(self) -> None:
        self.ends: queue.Queue[str] = queue.Queue()
        self.num_served = 0
        self.server = LinkServer("127.0.0.1", self.serve, name="echo")

    def serve(self, link: Link) -> None:
        self.num_served += 1
        try:
            while True:
                message, num_bytes = link.receive(**LIMITS)  # type: ignore[arg-type]
                body = bytearray(num_bytes)
                link.receive_body(memoryview(body), timeout_s=5)
                link.send(message, memoryview(body), timeout_s=5)
        except Unavailable as error:
            self.ends.put(str(error))
            raise


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.server.close()
    assert eventually(lambda: not made.server._links), "no link is left"


def eventually(condition: object, timeout_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def raw(address: LinkAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), 5)


def is_hung_up(peer: socket.socket) -> bool:
    """Nothing but the end comes."""
    peer.settimeout(5)
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


def test_messages_and_bodies_of_many_parts_come_whole_and_in_order(echo: Echo) -> None:
    link = connect(echo.server.address)
    rng = np.random.default_rng(1)
    for sizes in ((), (0,), (1,), (700_000, 3, 1_200_000), (5,) * 100):
        parts = [rng.integers(0, 256, size, np.uint8) for size in sizes]
        link.send(b"%d" % len(sizes), *[part.data for part in parts], timeout_s=5)
        assert link.receive(**LIMITS) == (b"%d" % len(sizes), sum(sizes))  # type: ignore[arg-type]
        for part in parts:
            into = np.zeros_like(part)
            link.receive_body(into.data, timeout_s=5)
            assert np.array_equal(into, part)
    assert link.is_usable()
    link.close()
    assert "closed" in echo.ends.get(timeout=5)


def test_who_does_not_know_the_secret_is_not_served(echo: Echo) -> None:
    for secret in (b"", b"x", bytes(32), echo.server.address.secret[:-1], echo.server.address.secret + b"x"):
        with pytest.raises(Unavailable, match=r"closed|broken"):
            connect(msgspec.structs.replace(echo.server.address, secret=secret))
    peer = raw(echo.server.address)
    greeting = peer.recv(GREETING_BYTES, socket.MSG_WAITALL)
    # What the server would have to prove is no proof of a client, nor is what another link was opened with.
    own = byte_link._GREETING + bytes(32)
    peer.sendall(own + byte_link._proof(echo.server.address.secret, b"server", greeting, own))
    assert is_hung_up(peer)
    replayed = own + byte_link._proof(echo.server.address.secret, b"client", greeting, own)
    other = raw(echo.server.address)
    other.recv(GREETING_BYTES, socket.MSG_WAITALL)
    other.sendall(replayed)
    assert is_hung_up(other)
    assert echo.num_served == 0


@pytest.mark.parametrize("num_bytes", [0, 1, GREETING_BYTES, GREETING_BYTES + PROOF_BYTES - 1])
def test_a_handshake_that_is_cut_or_never_ends_costs_nothing(
    echo: Echo, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_link, "_HANDSHAKE_TIMEOUT_S", 0.1)
    cut, silent = raw(echo.server.address), raw(echo.server.address)
    for peer in (cut, silent):
        peer.sendall(b"\0" * num_bytes)
    cut.close()
    silent.recv(GREETING_BYTES, socket.MSG_WAITALL)
    assert is_hung_up(silent)
    assert echo.num_served == 0
    connect(echo.server.address).close()


def test_a_server_that_does_not_know_the_secret_gets_nothing() -> None:
    """Whoever took over the port of a server that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = LinkAddress(host="127.0.0.1", port=impostor.getsockname()[1], secret=b"s" * 32)

        def answer(reply: bytes) -> None:
            peer, _ = impostor.accept()
            peer.sendall(reply[:GREETING_BYTES])
            peer.recv(GREETING_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
            peer.sendall(reply[GREETING_BYTES:])
            peer.close()

        greeting = byte_link._GREETING + bytes(32)
        for reply, problem in ((greeting + bytes(32), "secret"), (b"HTTP/1.1 400 Bad Request" * 4, "no link server")):
            thread = threading.Thread(target=answer, args=(reply,))
            thread.start()
            with pytest.raises(Unavailable, match=problem):
                connect(address)
            thread.join()
    with pytest.raises(Unavailable, match="cannot be reached"):
        connect(address)


@pytest.mark.parametrize(
    "header", [(65, 0), (0, (4 << 20) + 1), (2**32 - 1, 0), (0, 2**64 - 1), (2**32 - 1, 2**64 - 1)]
)
def test_what_is_larger_than_allowed_ends_the_link_before_memory_is_taken(echo: Echo, header: tuple[int, int]) -> None:
    link = connect(echo.server.address)
    link._socket.sendall(struct.pack("!IQ", *header))
    assert "too many" in echo.ends.get(timeout=5)
    with pytest.raises(Unavailable, match=r"closed|broken"):
        link.receive(**LIMITS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sent", [b"", b"\0\0\0\5", struct.pack("!IQ", 5, 100) + b"abc", struct.pack("!IQ", 0, 9) + b"8"]
)
def test_a_message_that_is_cut_ends_the_link(echo: Echo, sent: bytes) -> None:
    link = connect(echo.server.address)
    link._socket.sendall(sent)
    link._socket.shutdown(socket.SHUT_WR)
    assert "closed" in echo.ends.get(timeout=5)
    link.close()


def test_a_peer_that_is_too_slow_is_given_up_in_time(echo: Echo) -> None:
    link = connect(echo.server.address)
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="too slow"):
        link.receive(max_message_bytes=1, timeout_s=0.1)
    assert not link.is_usable()
    link.close()
    flooded = connect(echo.server.address)

    def flood() -> None:
        """Nobody takes it: the other side sends back what it has."""
        while True:
            flooded.send(b"", memoryview(bytes(4 << 20)), timeout_s=0.2)

    with pytest.raises(Unavailable, match="too slow"):
        flood()
    assert time.monotonic() - started_s < 4
    assert not flooded.is_usable()
    flooded.close()


def test_no_more_peers_than_may_be_are_served(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_link, "MAX_LINKS", 2)
    links = [connect(echo.server.address) for _ in range(2)]
    with pytest.raises(Unavailable):
        connect(echo.server.address)
    links.pop().close()
    assert eventually(lambda: len(echo.server._links) == 1)
    links.append(connect(echo.server.address))
    for link in links:
        link.close()


def test_an_address_does_not_show_its_secret() -> None:
    address = LinkAddress(host="h", port=1, secret=b"hidden")
    assert "hidden" not in f"{address} {address!r} {[address]}"


def test_a_server_that_is_closed_ends_its_links(echo: Echo) -> None:
    link = connect(echo.server.address)
    echo.server.close()
    with pytest.raises(Unavailable):
        link.receive(**LIMITS)  # type: ignore[arg-type]
    assert not link.is_usable()
    with pytest.raises(Unavailable):
        connect(echo.server.address)
