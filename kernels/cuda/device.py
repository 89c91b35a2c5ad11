"""Where kernels run: a card through CuPy (`module.CupyDevice`) or the processor (`host.HostDevice`, for tests)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from remora.kernels.cuda.source import CudaSource

Grid = tuple[int, int, int]


class Device(Protocol):
    """Arrays are whatever the device makes (numpy, CuPy) or understands (torch tensors on a card).

    bf16 arrays are torch.bfloat16 tensors, or uint16 bits where the array library has no bf16.
    """

    def launch(
        self,
        source: CudaSource,
        kernel: str,
        *,
        grid: Grid,
        threads: int,
        arguments: Sequence[np.generic],
        shared_bytes: int = 0,
    ) -> None:
        """Queues one kernel on the current stream. An empty grid does nothing.

        Arguments are numpy scalars of the kernel's types, addresses as uint64. Raises KernelError.
        """
        ...

    def prepare(self, source: CudaSource) -> None:
        """Does ahead of the first launch of a variant what takes long: not inside a graph capture."""
        ...

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        """The array on the device, in order with later launches."""
        ...

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        """The array in host memory, after all that was launched before."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any: ...

    def address(self, array: Any) -> np.uint64:
        """Of the first byte; raises KernelError for an array that is not contiguous. None has address 0."""
        ...

    @property
    def num_processors(self) -> int:
        """Multiprocessors: how many blocks keep the device busy."""
        ...


def upload_together(device: Device, arrays: Sequence[NDArray[np.int32]]) -> list[Any]:
    """The arrays on the device, by one copy; each begins at a multiple of 64 bytes."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.size // 16) * 16
    packed = np.zeros(end, np.int32)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = array.reshape(-1)
    uploaded = device.upload(packed)
    return [
        uploaded[start : start + array.size].reshape(array.shape) for start, array in zip(starts, arrays, strict=True)
    ]


def value_type(array: Any) -> str:
    """ "fp32" or "bf16", by the dtype of a numpy, CuPy or torch array; raises KernelError for another."""
    from remora.platform.base.errors import KernelError

    name = str(array.dtype).removeprefix("torch.")
    known = {"float32": "fp32", "bfloat16": "bf16", "uint16": "bf16"}
    if name not in known:
        raise KernelError(f"values of {name}: CUDA kernels take float32 and bfloat16")
    return known[name]
