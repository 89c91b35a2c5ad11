"""The GPU arena against a stand-in for CuPy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_cupy import FakeRuntime, fake_cupy

from remora.cache_actors.arena_header import ArenaIdentity
from remora.cache_actors.cuda_arena import CudaArena
from remora.platform.base.errors import ArenaError

BYTES = 1 << 16


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    cupy = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy.cuda.runtime


def identity(data_bytes: int = BYTES) -> ArenaIdentity:
    return ArenaIdentity(cluster_name="c", device_name="gpu0", boot_id="b", data_bytes=data_bytes, layout="extent=4096")


def test_memory_is_zeroed_shared_by_handle_and_given_back(runtime: FakeRuntime, tmp_path: Path) -> None:
    arena = CudaArena.create(tmp_path / "gpu0.arena", identity())
    (memory,) = runtime.allocations.values()
    assert not memory.any()
    assert arena.free_bytes() == (1 << 20) - BYTES
    assert (tmp_path / "gpu0.arena").stat().st_size < 1 << 17, "the file holds the header only"
    replica = CudaArena.open_ipc(arena.path, arena.ipc_handle())
    assert list(runtime.opened.values()) == list(runtime.allocations)
    arena.header.set_generation(3, 9)
    assert replica.header.may_emit(3, 9, arena.header.incarnation)
    memory[:] = 5
    arena.zero(10, 20)
    assert replica.data.nonzero()[0].tolist() == [*range(10), *range(30, BYTES)]
    arena.copy(0, 10, 10)
    assert replica.data.nonzero()[0].tolist() == [*range(20), *range(30, BYTES)]
    with pytest.raises(ValueError, match="outside"):
        arena.zero(BYTES - 1, 2)
    replica.close()
    assert not runtime.opened
    arena.close()
    assert not runtime.allocations
    arena.close()


def test_each_start_is_a_new_incarnation_and_old_mappings_must_stop(runtime: FakeRuntime, tmp_path: Path) -> None:
    first = CudaArena.create(tmp_path / "gpu0.arena", identity())
    incarnation = first.header.incarnation
    replica = CudaArena.open_ipc(first.path, first.ipc_handle())
    first.close()
    second = CudaArena.create(tmp_path / "gpu0.arena", identity())
    assert second.header.incarnation != incarnation
    assert not replica.header.may_emit(0, 0, incarnation)


def test_too_little_memory_and_dead_handles_are_arena_errors(runtime: FakeRuntime, tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="arena_bytes"):
        CudaArena.create(tmp_path / "gpu0.arena", identity(1 << 30))
    assert list(tmp_path.iterdir()) == []
    arena = CudaArena.create(tmp_path / "gpu0.arena", identity())
    with pytest.raises(ArenaError, match="mapped"):
        CudaArena.open_ipc(arena.path, bytes(64))


def test_the_uuid_is_the_one_that_selects_the_device(runtime: FakeRuntime, tmp_path: Path) -> None:
    arena = CudaArena.create(tmp_path / "gpu0.arena", identity())
    assert arena.device_uuid() == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ArenaError, match=r"remora\[gpu\]"):
        CudaArena.create(tmp_path / "gpu0.arena", identity())
