"""The GPU arena against a stand-in for CuPy that checks the calls: memory is real bytes, handles are numbers."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from remora.cache_actors.arena_header import ArenaIdentity
from remora.cache_actors.cuda_arena import CudaArena
from remora.platform.base.errors import ArenaError

BYTES = 1 << 16


class CUDARuntimeError(RuntimeError):
    pass


class FakeRuntime:
    """One GPU with 1 MiB."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.allocations: dict[int, np.ndarray] = {}
        self.opened: dict[int, int] = {}
        self.pending: list[tuple[int, int, int]] = []

    def malloc(self, size: int) -> int:
        if size > 1 << 20:
            raise CUDARuntimeError("out of memory")
        pointer = 0x1000_0000 * (len(self.allocations) + 1)
        self.allocations[pointer] = np.full(size, 0xAA, np.uint8)
        return pointer

    def free(self, pointer: int) -> None:
        del self.allocations[pointer]

    def memset(self, pointer: int, value: int, size: int) -> None:
        self.pending.append((pointer, value, size))

    def deviceSynchronize(self) -> None:
        for pointer, value, size in self.pending:
            base = max(start for start in self.allocations if start <= pointer)
            self.allocations[base][pointer - base : pointer - base + size] = value
        self.pending = []

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        assert pointer in self.allocations
        return pointer.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        assert flags == 1
        exported = int.from_bytes(handle, "little")
        if exported not in self.allocations:
            raise CUDARuntimeError("invalid handle")
        self.opened[exported + 0x8000_0000_0000] = exported
        return exported + 0x8000_0000_0000

    def ipcCloseMemHandle(self, pointer: int) -> None:
        del self.opened[pointer]

    def getDevice(self) -> int:
        return 0

    def getDeviceProperties(self, device: int) -> dict[str, bytes]:
        return {"uuid": bytes(range(16))}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    cupy = types.ModuleType("cupy")
    cupy.uint8 = np.uint8  # type: ignore[attr-defined]
    cupy.ndarray = lambda shape, dtype, memptr: (shape, dtype, memptr)  # type: ignore[attr-defined]
    cupy.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime,
        UnownedMemory=lambda pointer, size, owner: (pointer, size),
        MemoryPointer=lambda memory, offset: (memory, offset),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return runtime


def identity(data_bytes: int = BYTES) -> ArenaIdentity:
    return ArenaIdentity(cluster_name="c", device_name="gpu0", boot_id="b", data_bytes=data_bytes, layout="extent=4096")


def test_memory_is_zeroed_shared_by_handle_and_given_back(runtime: FakeRuntime, tmp_path: Path) -> None:
    arena = CudaArena.create(tmp_path / "gpu0.arena", identity())
    (memory,) = runtime.allocations.values()
    assert not memory.any()
    assert (tmp_path / "gpu0.arena").stat().st_size < 1 << 17, "the file holds the header only"
    replica = CudaArena.open_ipc(arena.path, arena.ipc_handle())
    assert replica.data == ((BYTES,), np.uint8, ((next(iter(runtime.opened)), BYTES), 0))
    arena.header.set_generation(3, 9)
    assert replica.header.may_emit(3, 9, arena.header.incarnation)
    memory[:] = 5
    arena.zero(10, 20)
    assert memory.nonzero()[0].tolist() == [*range(10), *range(30, BYTES)]
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
