"""A stand-in for CuPy with one GPU: memory is real bytes, handles are numbers, what is queued is done when waited for.

Pointers are addresses in this process; another process's mapping of an allocation has a number of its own.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DEVICE_TO_DEVICE = 3
#: Between an allocation and its mapping elsewhere.
_MAPPED = 1 << 62


class CUDARuntimeError(RuntimeError):
    pass


class DeviceArray(np.ndarray):
    """What cupy.ndarray has beyond numpy's."""

    def get(self) -> NDArray[Any]:
        return np.array(self)


class FakeRuntime:
    """cupy.cuda.runtime."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.allocations: dict[int, NDArray[np.uint8]] = {}
        self.opened: dict[int, int] = {}
        self._pending: list[tuple[NDArray[np.uint8], Any]] = []

    def bytes_at(self, pointer: int, size: int) -> NDArray[np.uint8]:
        """Raises ValueError for what nobody allocated."""
        pointer -= _MAPPED if pointer >= _MAPPED else 0
        for start, memory in self.allocations.items():
            if start <= pointer and pointer + size <= start + len(memory):
                return memory[pointer - start : pointer - start + size]
        raise ValueError(f"{size} bytes at {pointer:#x} are nobody's")

    def malloc(self, size: int) -> int:
        if size > self.memGetInfo()[0]:
            raise CUDARuntimeError("out of memory")
        memory = np.full(size, 0xAA, np.uint8)
        self.allocations[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, pointer: int) -> None:
        del self.allocations[pointer]

    def memset(self, pointer: int, value: int, size: int) -> None:
        self._pending.append((self.bytes_at(pointer, size), value))

    def memcpy(self, target: int, source: int, size: int, kind: int) -> None:
        assert kind == _DEVICE_TO_DEVICE
        self._pending.append((self.bytes_at(target, size), self.bytes_at(source, size)))

    def deviceSynchronize(self) -> None:
        for target, value in self._pending:
            target[:] = value
        self._pending = []

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        assert pointer in self.allocations
        return pointer.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        assert flags == 1
        exported = int.from_bytes(handle, "little")
        if exported not in self.allocations:
            raise CUDARuntimeError("invalid handle")
        self.opened[exported + _MAPPED] = exported
        return exported + _MAPPED

    def ipcCloseMemHandle(self, pointer: int) -> None:
        del self.opened[pointer]

    def memGetInfo(self) -> tuple[int, int]:
        return self.total_bytes - sum(each.size for each in self.allocations.values()), self.total_bytes

    def getDevice(self) -> int:
        return 0

    def getDeviceProperties(self, device: int) -> dict[str, bytes]:
        return {"uuid": bytes(range(16))}


def fake_cupy(total_bytes: int = 1 << 20) -> Any:
    """The module; `cuda.runtime` is its FakeRuntime."""
    runtime, cupy = FakeRuntime(total_bytes), types.ModuleType("cupy")

    def make_array(shape: tuple[int], dtype: Any, memptr: tuple[tuple[int, int], int]) -> NDArray[Any]:
        (pointer, size), offset = memptr
        return runtime.bytes_at(pointer + offset, size).view(dtype).reshape(shape).view(DeviceArray)

    cupy.uint8 = np.uint8  # type: ignore[attr-defined]
    cupy.ndarray = make_array  # type: ignore[attr-defined]
    cupy.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime,
        UnownedMemory=lambda pointer, size, owner: (pointer, size),
        MemoryPointer=lambda memory, offset: (memory, offset),
    )
    return cupy
