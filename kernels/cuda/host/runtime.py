"""A kernels.cuda.runtime.Runtime on the processor, for tests: emulated kernels, torch's tensors in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.cuda.host.emulator import HostDevice
from remora.kernels.cuda.runtime import Captured, MemoryState, TorchArrays


class EmulatedRuntime(TorchArrays, HostDevice):
    """Whatever is queued is done at once. Fresh memory is NaN."""

    name = "emulated"
    torch_device = torch.device("cpu")

    def __init__(self, cache_dir: Path, compiler: str = "g++") -> None:
        super().__init__(cache_dir, compiler)
        self._lock = threading.RLock()
        #: Tests set it.
        self.state = MemoryState(1 << 40, 1 << 40)
        self.broken_by = ""
        self.num_captures = self.num_replays = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            yield

    def tensor(self, data: Any) -> torch.Tensor:
        return data if isinstance(data, torch.Tensor) else torch.from_numpy(data)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        tensor: torch.Tensor = super().empty(shape, dtype)
        tensor.view(torch.uint8).fill_(0xFF)
        return tensor

    def staging(self, num_ints: int) -> NDArray[np.int32]:
        return np.zeros(num_ints, np.int32)

    def refill(self, target: torch.Tensor, staging: NDArray[np.int32]) -> None:
        target.copy_(torch.from_numpy(staging))

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        """A replay does the work again: it shows that nothing is read but tensors that stay where they are."""
        self.num_captures += 1
        result = torch.full_like(work(), torch.nan)

        def replay() -> None:
            self.num_replays += 1
            result.copy_(work())

        return Captured(replay, result)

    def memory(self) -> MemoryState:
        return self.state

    def failure(self) -> str:
        return self.broken_by
