"""Where a decoder runs: a device that launches our kernels and holds torch's tensors, in order with each other.

Two of them: a card (`card.CardRuntime`), and the processor with emulated kernels (`host.runtime`, for tests).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.cuda.device import Device


class Captured(NamedTuple):
    """Work that can be done again without its caller: over the same tensors, with whatever they hold by then."""

    replay: Callable[[], None]
    #: What the work returned; each replay fills it anew.
    result: torch.Tensor


class MemoryState(NamedTuple):
    """Of a device, in bytes."""

    free_bytes: int
    total_bytes: int


class Runtime(Device, Protocol):
    """Arrays are tensors on `torch_device`. Threads take turns."""

    @property
    def name(self) -> str:
        """What it runs on, for the log and /v1/replicas."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    def turn(self) -> AbstractContextManager[None]:
        """Around everything that is queued or allocated: one order of torch's and our kernels, one thread at a time."""
        ...

    def tensor(self, data: Any) -> torch.Tensor:
        """Memory of the device as uint8 [bytes], without a copy."""
        ...

    def staging(self, num_ints: int) -> NDArray[np.int32]:
        """Host memory from which `refill` copies without waiting."""
        ...

    def refill(self, target: torch.Tensor, staging: NDArray[np.int32]) -> None:
        """Queues the copy of all of `staging`; it must not be written before the next download."""
        ...

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        """Inside a turn. The work was done once before, allocates what it returns and waits for nothing."""
        ...

    def memory(self) -> MemoryState: ...

    def failure(self) -> str:
        """Why the device can do nothing more for this process, as after an access to memory that is nobody's; "" while
        it can."""
        ...


class TorchArrays:
    """The arrays of a Device as torch tensors."""

    torch_device: torch.device

    def upload(self, array: NDArray[Any]) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.torch_device, copy=True)

    def download(self, array: torch.Tensor) -> NDArray[Any]:
        """bf16 comes as its bits."""
        host = array.detach().cpu()
        result: NDArray[Any] = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()
        return result

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """`dtype`: numpy's or torch's."""
        if not isinstance(dtype, torch.dtype):
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.empty(shape, dtype=dtype, device=self.torch_device)
