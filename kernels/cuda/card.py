"""A kernels.cuda.runtime.Runtime on an NVIDIA GPU: torch and CuPy on one stream of the current device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from remora.kernels.cuda.module import CupyDevice
from remora.kernels.cuda.runtime import Captured, MemoryState, TorchArrays
from remora.platform.base.errors import KernelError


class CardRuntime(TorchArrays, CupyDevice):
    """The first card that the process sees (CUDA_VISIBLE_DEVICES)."""

    def __init__(self, cubin_dir: Path | None = None) -> None:
        """Raises KernelError without CuPy, a CUDA build of torch or a card."""
        super().__init__(cubin_dir)
        if not torch.cuda.is_available():
            raise KernelError(
                f"torch {torch.__version__} sees no GPU: devices of kind cuda need a CUDA build of torch, and a driver "
                "that is new enough for it"
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name: str = torch.cuda.get_device_name(self.torch_device)
        # Sums of products stay in fp32 until the end.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_tf32 = False
        # A graph cannot be captured on the default stream.
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # torch's
        self._launch_stream = self._cupy.cuda.Stream.from_external(self._stream)
        self._lock = threading.RLock()
        self._graph_pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with (
            self._lock,
            torch.cuda.device(self.torch_device),
            torch.cuda.stream(self._stream),
            self._launch_stream,
        ):
            yield

    def tensor(self, data: Any) -> torch.Tensor:
        return data if isinstance(data, torch.Tensor) else from_dlpack(data)

    def staging(self, num_ints: int) -> NDArray[np.int32]:
        array: NDArray[np.int32] = torch.zeros(num_ints, dtype=torch.int32, pin_memory=True).numpy()
        return array

    def refill(self, target: torch.Tensor, staging: NDArray[np.int32]) -> None:
        target.copy_(torch.from_numpy(staging), non_blocking=True)

    def capture(self, work: Callable[[], torch.Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the card meanwhile.
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        return Captured(graph.replay, result)

    def memory(self) -> MemoryState:
        return MemoryState(*torch.cuda.mem_get_info(self.torch_device))

    def failure(self) -> str:
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            return str(error)
        return ""
