"""Blocks of an arena over links: those that are held, as they lie there, or nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from remora.cache_actors import block_links
from remora.cache_actors import block_server as server_module
from remora.cache_actors.block_exports import checksum
from remora.cache_actors.block_links import LinkedBlocks, PoolLinks
from remora.cache_actors.block_server import BlockServer, ReadHeld, ReadTail
from remora.cache_actors.byte_link import LinkAddress
from remora.namespaces.hold_commands import Held
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import HoldId

SIZE, NUM_BLOCKS = 96 * 1024, 12
HELD = Held(blocks=(3, 4, 9, 0, 7), block_bytes=SIZE, until_s=1e9)
KEPT = HoldId("kept")


class Source:
    """A pool with one hold."""

    def __init__(self) -> None:
        self.data = np.random.default_rng(3).integers(0, 256, NUM_BLOCKS * SIZE + 5, np.uint8)
        self.holds = {KEPT: HELD}
        #: The hold runs out when it has been looked up so many times.
        self.num_looks = 1 << 30
        self.num_asked = 0
        self.server = BlockServer(self, self.data, name="source")
        self.links = PoolLinks("source", self._ask)
        self.let_go: list[HoldId] = []

    def held(self, hold_id: HoldId) -> Held:
        self.num_looks -= 1
        return self.holds.get(hold_id, Held()) if self.num_looks >= 0 else Held()

    def _ask(self) -> LinkAddress | None:
        self.num_asked += 1
        return self.server.open()

    def reader(self, held: Held = HELD) -> LinkedBlocks:
        link = self.links.take()
        assert link is not None
        return LinkedBlocks(self.links, link, KEPT, held, lambda: self.let_go.append(KEPT))

    def row(self, block: int) -> bytes:
        return bytes(self.data[block * SIZE : (block + 1) * SIZE])


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    monkeypatch.setattr(server_module, "node_ip", lambda: "127.0.0.1")
    made = Source()
    yield made
    made.server.close()


def test_held_blocks_come_as_they_lie_there_and_the_link_is_used_again(source: Source) -> None:
    for _ in range(3):
        reader = source.reader()
        found: list[bytes] = []
        for first, count in ((0, 2), (2, 2), (4, 1)):
            into_NB = np.zeros((count, SIZE), np.uint8)
            sums = reader.read(first, into_NB)
            assert sums == tuple(checksum(row) for row in into_NB)
            found += [bytes(row) for row in into_NB]
        reader.close()
        assert found == [source.row(block) for block in HELD.blocks]
    assert (source.let_go, source.num_asked, len(source.links._idle)) == ([KEPT] * 3, 1, 1)


@pytest.mark.parametrize(("num_looks", "problem"), [(0, "not held any more"), (1, "not held until")])
def test_blocks_whose_hold_has_run_out_are_not_used(source: Source, num_looks: int, problem: str) -> None:
    reader, source.num_looks = source.reader(), num_looks
    with pytest.raises(Unavailable, match=problem):
        reader.read(0, np.zeros((5, SIZE), np.uint8))
    reader.close()
    assert not source.links._idle, "the link of a load that failed may have anything on its way"
    assert source.let_go == [KEPT]


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (4, 2), (5, 1), (0, 0), (0, 2**40), (2**62, 1)])
def test_blocks_that_the_hold_does_not_have_are_refused(source: Source, first: int, count: int) -> None:
    link = source.links.take()
    assert link is not None
    block_links._ask(link, ReadHeld(hold_id=KEPT, first=first, count=count), 1e12)
    with pytest.raises(Unavailable, match="not held"):
        block_links._take_reply(link, 0, 1e12)
    link.close()


def test_a_pool_that_has_other_blocks_than_it_said_is_a_miss(source: Source) -> None:
    reader = source.reader(Held(blocks=(1,), block_bytes=SIZE + 1, until_s=1e9))
    with pytest.raises(Unavailable, match="not"):
        reader.read(0, np.zeros((1, SIZE + 1), np.uint8))
    reader.close()


def test_a_piece_that_is_given_up_takes_its_link_with_it(source: Source) -> None:
    reader = source.reader()
    reader.read(0, np.zeros((2, SIZE), np.uint8))
    reader.close()
    assert not source.links._idle, "the next piece is on its way"
    reader = source.reader()
    reader.read(0, np.zeros((2, SIZE), np.uint8))
    with pytest.raises(Unavailable, match="in order"):
        reader.read(3, np.zeros((2, SIZE), np.uint8))
    reader.close()


def test_a_tail_is_read_only_over_a_link_that_is_known(source: Source) -> None:
    def tail(*blocks: int) -> list[bytes]:
        return [bytes(row) for row in source.links.read_tail(blocks, SIZE, timeout_s=5)]

    assert tail(1) == []
    source.links.prepare()
    assert tail(8, 2) == [source.row(8), source.row(2)]
    next(source.links.read_tail((1, 2), SIZE, timeout_s=5))
    assert tail(5) == [source.row(5)], "who stops in the middle leaves nothing behind"


@pytest.mark.parametrize(
    ("blocks", "size"), [((NUM_BLOCKS,), SIZE), ((0, -1), SIZE), ((0,), 0), ((0,), -5), ((1,), 2**50), ((0,) * 1025, 1)]
)
def test_no_tail_is_read_beyond_the_arena(source: Source, blocks: tuple[int, ...], size: int) -> None:
    link = source.links.take()
    assert link is not None
    block_links._ask(link, ReadTail(blocks=blocks, block_bytes=size), 1e12)
    with pytest.raises(Unavailable, match="no such blocks"):
        block_links._take_reply(link, 0, 1e12)
    link.close()


@pytest.mark.parametrize("request_bytes", [b"", b"\xc1", b"\x80", b"\xdb\xff\xff\xff\xff", b"x" * 4096])
def test_who_speaks_another_language_is_not_listened_to(source: Source, request_bytes: bytes) -> None:
    link = source.links.take()
    assert link is not None
    link.send(request_bytes, timeout_s=5)
    with pytest.raises(Unavailable, match=r"closed|broken"):
        link.receive(max_message_bytes=100, timeout_s=5)
    link.close()


def test_a_pool_that_listens_elsewhere_after_a_restart_is_asked_where(source: Source) -> None:
    source.links.prepare()
    source.server.close()
    source.server = BlockServer(source, source.data, name="source")
    reader = source.reader()
    assert len(reader.read(0, np.zeros((1, SIZE), np.uint8))) == 1
    reader.close()
    assert source.num_asked == 2


def test_a_pool_that_cannot_be_linked_to_is_not_tried_again_at_once(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nowhere = LinkAddress(host="127.0.0.1", port=port, secret=bytes(32))
    monkeypatch.setattr(source.server, "open", lambda: nowhere)
    assert [source.links.take() for _ in range(3)] == [None] * 3
    assert source.num_asked == 1
    monkeypatch.undo()
    monkeypatch.setattr(server_module, "node_ip", lambda: "127.0.0.1")
    source.links._silent_until_s = 0.0
    assert source.links.take() is not None


@pytest.mark.parametrize("problem", ["encrypted", "no address"])
def test_there_are_no_links_where_ray_encrypts_or_the_node_has_no_such_address(
    source: Source, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def address() -> Any:
        return "203.0.113.77"

    if problem == "encrypted":
        monkeypatch.setenv("RAY_USE_TLS", "1")
    else:
        monkeypatch.setattr(server_module, "node_ip", address)
    source.server = BlockServer(source, source.data, name="source")
    assert source.server.open() is None
    assert source.links.take() is None
