"""An arena in the memory of a GPU: one allocation outside the caching allocators of frameworks, shared by CUDA IPC.

The words that fence leases stay in host memory: a small arena file holds the header only. Device memory dies with the
process that allocated it, so a pool on a GPU never adopts: each start is a new incarnation, and replicas that hold a
mapping of the old one launch nothing more (design §4.6). CuPy is imported when an arena is made or mapped.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, Final

import msgspec

from remora.cache_actors.arena import Arena
from remora.cache_actors.arena_header import ArenaHeader, ArenaIdentity
from remora.platform.base.errors import ArenaError


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ArenaError(f"a device of kind cuda needs CuPy (pip install 'remora[gpu]'): {error}") from None
    return cupy


#: cudaMemcpyKind
_DEVICE_TO_DEVICE: Final = 3


class CudaArena:
    """The interface of Arena; `data` is [data_bytes] uint8 on the current device."""

    def __init__(self, header_arena: Arena, pointer: int, data_bytes: int, *, owner: bool) -> None:
        """Takes the pointer over. Use `create` or `open_ipc`."""
        cupy = _cupy()
        self._runtime = cupy.cuda.runtime
        self._header_arena = header_arena
        self._pointer = pointer
        self._data_bytes = data_bytes
        self.is_owner: Final = owner
        self.path = header_arena.path
        memory = cupy.cuda.UnownedMemory(pointer, data_bytes, self)
        self.data: Any = cupy.ndarray((data_bytes,), dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))

    @property
    def header(self) -> ArenaHeader:
        return self._header_arena.header

    @staticmethod
    def create(path: Path, identity: ArenaIdentity) -> CudaArena:
        """Allocates zeroed memory on the current device. Raises ArenaError when the device has not that much."""
        runtime = _cupy().cuda.runtime
        fresh = msgspec.structs.replace(identity, data_bytes=0, layout=f"{identity.data_bytes}:{uuid.uuid4().hex}")
        header_arena = Arena.adopt_or_create(path, fresh).arena
        try:
            pointer = runtime.malloc(identity.data_bytes)
        except runtime.CUDARuntimeError as error:
            header_arena.unlink()
            header_arena.close()
            raise ArenaError(
                f"the GPU cannot give {identity.data_bytes} bytes ({error}); lower arena_bytes or end other users of it"
            ) from None
        arena = CudaArena(header_arena, pointer, identity.data_bytes, owner=True)
        arena.zero(0, identity.data_bytes)
        return arena

    @staticmethod
    def open_ipc(path: Path, ipc_handle: bytes) -> CudaArena:
        """Maps the memory of a running pool; the process must see the pool's device as its current one."""
        runtime = _cupy().cuda.runtime
        header_arena = Arena.open(path)
        try:
            pointer = runtime.ipcOpenMemHandle(ipc_handle, 1)  # 1: enable peer access lazily, the only legal value
        except runtime.CUDARuntimeError as error:
            header_arena.close()
            raise ArenaError(f"{path}: the GPU memory of the pool cannot be mapped: {error}") from None
        data_bytes = int(header_arena.header.identity.layout.partition(":")[0])
        return CudaArena(header_arena, pointer, data_bytes, owner=False)

    def ipc_handle(self) -> bytes:
        """What another process on the node needs to map the memory."""
        return bytes(self._runtime.ipcGetMemHandle(self._pointer))

    def device_uuid(self) -> str:
        """UUID of the current device in the form of CUDA_VISIBLE_DEVICES."""
        raw = bytes(self._runtime.getDeviceProperties(self._runtime.getDevice())["uuid"])
        return f"GPU-{uuid.UUID(bytes=raw)}"

    def zero(self, offset: int, num_bytes: int) -> None:
        """Overwrites a range of the data with zeros and waits for it. Raises ValueError outside the data."""
        if not 0 <= offset <= offset + num_bytes <= self._data_bytes:
            raise ValueError(f"{offset} .. {offset + num_bytes} is outside the arena's {self._data_bytes} bytes")
        self._runtime.memset(self._pointer + offset, 0, num_bytes)
        self._runtime.deviceSynchronize()

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copies a range of the data to another that does not touch it, and waits for it. Raises ValueError outside."""
        if min(source, target) < 0 or max(source, target) + num_bytes > self._data_bytes:
            raise ValueError(f"{source} or {target} .. +{num_bytes} is outside the arena's {self._data_bytes} bytes")
        self._runtime.memcpy(self._pointer + target, self._pointer + source, num_bytes, _DEVICE_TO_DEVICE)
        self._runtime.deviceSynchronize()

    def free_bytes(self) -> int:
        return int(self._runtime.memGetInfo()[0])

    def close(self) -> None:
        """Unmaps, or frees if this process allocated. `data` must not be used any more."""
        if self._pointer:
            if self.is_owner:
                self._runtime.free(self._pointer)
            else:
                self._runtime.ipcCloseMemHandle(self._pointer)
            self._pointer = 0
            self._header_arena.close()

    def unlink(self) -> None:
        """Removes the header file and tells replicas to stop."""
        self._header_arena.unlink()
