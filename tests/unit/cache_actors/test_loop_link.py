"""Links between event loops: questions find their answers, errors keep their names, and a broken link says so."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import msgspec
import pytest

from remora.cache_actors import loop_link
from remora.cache_actors.byte_link import LinkAddress, connect
from remora.cache_actors.loop_link import LoopLink, LoopLinkServer, connect_link
from remora.platform.base.errors import OverQuota, RemoraError, Unavailable

ECHO, LATE, REFUSE, FAIL, SPEAK, GROW = range(6)


class World:
    """A server that answers, and what it hears."""

    def __init__(self) -> None:
        self.server = LoopLinkServer(self.accept, name="world")
        self.peers: list[LoopLink] = []
        self.heard: list[tuple[int, bytes]] = []
        self.num_ended = 0
        self.go_on = asyncio.Event()

    def accept(self) -> LoopLink:
        peer = LoopLink(answer=self.answer, hear=lambda topic, data: self.heard.append((topic, data)), on_end=self.end)
        self.peers.append(peer)
        return peer

    def end(self) -> None:
        self.num_ended += 1

    async def answer(self, topic: int, data: bytes) -> bytes:
        if topic == LATE:
            await self.go_on.wait()
        elif topic == REFUSE:
            raise OverQuota("not now", retry_after_s=7.5, field="namespace")
        elif topic == FAIL:
            raise KeyError("a bug")
        elif topic == GROW:
            return 200 * data
        elif topic == SPEAK:
            for number in range(int(data)):
                self.peers[-1].tell(SPEAK, b"%d" % number)
        return data


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_link, "node_ip", lambda: "127.0.0.1")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    world.server.close()


async def joined(world: World, link: LoopLink | None = None) -> LoopLink:
    link = link or LoopLink()
    await connect_link(address_of(world), link)
    return link


def address_of(world: World) -> LinkAddress:
    address = world.server.open()
    assert address is not None
    return address


async def eventually(condition: object) -> None:
    async with asyncio.timeout(5):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_each_question_gets_its_own_answer(world: World) -> None:
    link = await joined(world)
    late = asyncio.create_task(link.ask(LATE, b"first"))
    sizes = [0, 1, 65_536, 3_000_000]
    assert await asyncio.gather(*(link.ask(ECHO, bytes([size % 251]) * size) for size in sizes)) == [
        bytes([size % 251]) * size for size in sizes
    ]
    assert not late.done(), "others need not wait for it"
    world.go_on.set()
    assert await late == b"first"


async def test_an_error_arrives_as_what_it_is(world: World) -> None:
    link = await joined(world)
    with pytest.raises(OverQuota, match="not now") as refused:
        await link.ask(REFUSE, b"")
    assert (refused.value.retry_after_s, refused.value.field) == (7.5, "namespace")
    with pytest.raises(RemoraError, match="KeyError"):
        await link.ask(FAIL, b"")
    assert await link.ask(ECHO, b"still") == b"still"
    (peer,) = world.peers
    with pytest.raises(Unavailable):
        await peer.ask(ECHO, b"the other way, where nobody answers")


async def test_what_is_told_comes_whole_and_in_order(world: World) -> None:
    heard: list[int] = []
    link = await joined(world, LoopLink(hear=lambda _, data: heard.append(int(data))))
    await link.ask(SPEAK, b"2000")
    assert heard == list(range(2000)), "all of it before the answer that was sent behind"
    link.tell(3, b"yes")
    await link.ask(ECHO, b"")
    assert world.heard == [(3, b"yes")]


async def test_a_broken_link_fails_what_is_open_and_everything_after(world: World) -> None:
    ended = asyncio.Event()
    link = await joined(world, LoopLink(on_end=ended.set))
    open_question = asyncio.create_task(link.ask(LATE, b""))
    await link.ask(ECHO, b"")
    world.peers[0].close()
    with pytest.raises(Unavailable, match="broken"):
        async with asyncio.timeout(5):
            await open_question
    assert ended.is_set()
    assert not link.is_open
    with pytest.raises(Unavailable):
        await link.ask(ECHO, b"")
    with pytest.raises(Unavailable):
        link.tell(ECHO, b"")
    await eventually(lambda: world.num_ended == 1)
    world.go_on.set()  # nobody is there for the answer; that is no error


async def test_a_reader_that_stands_still_holds_the_writer_back(world: World) -> None:
    standing = await asyncio.to_thread(connect, address_of(world))  # never reads
    await eventually(lambda: world.peers and world.peers[0].is_open)
    (peer,) = world.peers
    num_sent = 0
    waiting = asyncio.create_task(peer.drain())
    while waiting.done() or not num_sent:
        peer.tell(ECHO, bytes(256 * 1024))
        num_sent += 1
        assert num_sent < 1000, "what waits is bounded"
        waiting = asyncio.create_task(peer.drain())
        await asyncio.wait({waiting}, timeout=0.2)
    standing.close()
    async with asyncio.timeout(5):
        await waiting  # the end of the link lets it go on, to find that out


@pytest.mark.parametrize("header", [struct.pack("!IBBI", 2**31, 0, 0, 0), struct.pack("!IBBI", 0, 9, 0, 0)])
async def test_what_is_no_message_of_ours_ends_the_link(world: World, header: bytes) -> None:
    peer = (await asyncio.to_thread(connect, address_of(world))).detach()
    peer.sendall(header)
    await eventually(lambda: world.num_ended == 1)
    assert world.heard == []
    peer.close()


async def test_a_message_that_the_other_side_would_refuse_is_not_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_link, "MAX_MESSAGE_BYTES", 150)
    link = await joined(world)
    with pytest.raises(Unavailable, match="too large"):
        await link.ask(ECHO, bytes(151))
    with pytest.raises(RemoraError, match="too large"):
        await asyncio.wait_for(link.ask(GROW, b"x"), 5)
    assert await link.ask(ECHO, b"small") == b"small"


async def test_only_who_knows_the_secret_is_heard_and_only_so_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = msgspec.structs.replace(address_of(world), secret=bytes(32))
    with pytest.raises(Unavailable):
        await connect_link(wrong, LoopLink())
    with socket.create_connection((wrong.host, wrong.port)) as silent:
        silent.sendall(struct.pack("!IBBI", 0, 0, 0, 0))
        link = await joined(world)
        await link.ask(ECHO, b"")
        assert world.heard == []
    monkeypatch.setattr(loop_link, "MAX_LINKS", 1)
    second = await joined(world)
    with pytest.raises(Unavailable):
        async with asyncio.timeout(5):
            await second.ask(ECHO, b"")
    link.close()
    await eventually(lambda: all(peer.has_ended for peer in world.peers))
    third = await joined(world)
    assert await third.ask(ECHO, b"again") == b"again"


async def test_nobody_listens_any_more_after_the_end(world: World) -> None:
    address = address_of(world)
    link = await joined(world)
    world.server.close()
    await eventually(lambda: not link.is_open)
    with pytest.raises(Unavailable):
        await connect_link(address, LoopLink())
    assert world.server.open() is None


async def test_where_ray_encrypts_or_the_address_is_nobodys_there_are_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_link, "node_ip", lambda: "192.0.2.1")
    assert World().server.open() is None
    monkeypatch.setattr(loop_link, "node_ip", lambda: "127.0.0.1")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert World().server.open() is None
