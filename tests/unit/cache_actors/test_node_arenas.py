"""Single blocks that are copied out of arenas without their pools: good or not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.cache_actors.test_arena import identity

from remora.cache_actors.arena import Arena
from remora.cache_actors.node_arenas import NodeArenas
from remora.cache_actors.port import KVSource
from remora.platform.base.errors import ArenaError, Unavailable
from remora.platform.base.ids import PoolId

SIZE = 4096


def arena(path: Path, seed: int) -> Arena:
    made = Arena.create(path, identity())
    made.data[:] = np.random.default_rng(seed).integers(0, 256, len(made.data), np.uint8)
    return made


def test_blocks_of_this_arena_and_of_others_come_as_far_as_they_are_sound(tmp_path: Path) -> None:
    own, other = arena(tmp_path / "own.arena", 1), arena(tmp_path / "other.arena", 2)
    reader = NodeArenas("node", str(own.path), own.data)
    writer = NodeArenas("node", str(other.path), other.data)
    wanted = [(block, writer.checksum(block, SIZE)) for block in (3, 1, 2)]
    for place, named in (
        (other, wanted),
        (own, [(block, reader.checksum(block, SIZE)) for block in (3, 1, 2)]),
    ):
        found = [bytes(each) for each in reader.read("node", str(place.path), named, SIZE)]
        assert found == [bytes(place.data[block * SIZE : (block + 1) * SIZE]) for block in (3, 1, 2)]
    other.data[1 * SIZE + 17] ^= 1
    assert len(list(reader.read("node", str(other.path), wanted, SIZE))) == 1, "nor what is behind it"
    own.close()
    other.close()


class Others:
    """A pool of another node, whose blocks are read over a link or not at all."""

    def __init__(self, data: NDArray[np.uint8], problem: str = "") -> None:
        self.data, self.problem = data, problem
        self.prepared: list[KVSource] = []

    def prepare(self, source: KVSource) -> None:
        self.prepared.append(source)

    def read_tail(
        self, source: KVSource, blocks: Sequence[int], block_bytes: int, *, timeout_s: float
    ) -> Iterator[NDArray[np.uint8]]:
        for block in blocks:
            yield self.data[block * block_bytes : (block + 1) * block_bytes].copy()
        if self.problem:
            raise Unavailable(self.problem)


def test_a_tail_comes_from_another_node_as_far_as_it_is_sound(tmp_path: Path) -> None:
    own, other = arena(tmp_path / "own.arena", 1), arena(tmp_path / "other.arena", 2)
    others, source = Others(other.data), KVSource(pool_id=PoolId("p"), actor_name="pool")
    reader = NodeArenas("node", str(own.path), own.data, others)
    writer = NodeArenas("far", str(other.path), other.data)
    wanted = [(block, writer.checksum(block, SIZE)) for block in (3, 1, 2)]
    reader.prepare(None)
    reader.prepare(source)
    assert others.prepared == [source]

    def found() -> list[bytes]:
        return [bytes(row) for row in reader.read("far", str(other.path), wanted, SIZE, source)]

    assert found() == [bytes(other.data[block * SIZE : (block + 1) * SIZE]) for block in (3, 1, 2)]
    assert list(reader.read("far", str(other.path), wanted, SIZE)) == [], "nobody knows where that is"
    other.data[1 * SIZE + 17] ^= 1
    assert len(found()) == 1, "nor what is behind it"
    others.problem = "the peer is too slow"
    other.data[1 * SIZE + 17] ^= 1
    with pytest.raises(Unavailable, match="too slow"):
        found()
    own.close()
    other.close()


def test_what_cannot_be_read_gives_nothing_or_says_so(tmp_path: Path) -> None:
    own = arena(tmp_path / "own.arena", 1)
    reader = NodeArenas("node", str(own.path), own.data)
    end = len(own.data) // SIZE
    assert list(reader.read("another node", str(own.path), [(0, reader.checksum(0, SIZE))], SIZE)) == []
    for block in (-1, end, end + 5):
        assert list(reader.read("node", str(own.path), [(block, 0)], SIZE)) == []
    with pytest.raises(ArenaError):
        list(reader.read("node", str(tmp_path / "gone.arena"), [(0, 0)], SIZE))
    own.close()
