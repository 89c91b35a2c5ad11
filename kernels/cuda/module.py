"""Kernels on an NVIDIA GPU: machine code in CuPy modules, launched on CuPy's current stream.

CuPy is imported when a device is made. What a card compiled once is kept as a cubin on disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remora.kernels.cuda.compile import COMPILE_OPTIONS, compile_cubin, toolkit_version
from remora.kernels.cuda.device import Grid
from remora.kernels.cuda.source import CudaSource
from remora.platform.base.errors import KernelError
from remora.platform.base.paths import default_state_dir

_log = logging.getLogger(__name__)

#: What a block may use without asking the driver.
_PLAIN_SHARED_BYTES = 48 * 1024


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise KernelError(f"kernels on a GPU need CuPy (pip install 'remora[gpu]'): {error}") from None
    return cupy


class CupyDevice:
    """kernels.cuda.device.Device on the current CUDA device. One thread at a time."""

    def __init__(self, cubin_dir: Path | None = None) -> None:
        """Raises KernelError without CuPy or a card."""
        self._cupy = _cupy()
        try:
            device = self._cupy.cuda.Device()
            self.architecture = f"sm_{device.compute_capability}"
            self.num_processors = int(device.attributes["MultiProcessorCount"])
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise KernelError(f"no usable NVIDIA GPU: {error}") from None
        self._cubin_dir = cubin_dir or default_state_dir() / "cubins"
        self._kernels: dict[tuple[CudaSource, str], Any] = {}
        self._modules: dict[CudaSource, Any] = {}

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
        """The first launch of a variant compiles and loads it: not inside a graph capture."""
        if 0 in grid:
            return
        function = self._kernels.get((source, kernel))
        if function is None:
            function = self._kernels[source, kernel] = self._load(source).get_function(kernel)
        if shared_bytes > _PLAIN_SHARED_BYTES and function.max_dynamic_shared_size_bytes < shared_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
        function(grid, (threads, 1, 1), tuple(arguments), shared_mem=shared_bytes)

    def prepare(self, source: CudaSource) -> None:
        """Compiles and loads it."""
        for name in source.kernel_names():
            if (source, name) not in self._kernels:
                self._kernels[source, name] = self._load(source).get_function(name)

    def _load(self, source: CudaSource) -> Any:
        module = self._modules.get(source)
        if module is None:
            module = self._modules[source] = self._cupy.RawModule(path=str(self._cubin(source)))
        return module

    def _cubin(self, source: CudaSource) -> Path:
        identity = (source.text(), source.headers(), source.macros, COMPILE_OPTIONS, toolkit_version())
        key = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
        path = self._cubin_dir / f"{source.name}-{self.architecture}-{key}.cubin"
        if not path.exists():
            _log.info("compiling %s for %s", source, self.architecture)
            cubin = compile_cubin(source, self.architecture)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(cubin)
            temporary.rename(path)
        return path

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        return self._cupy.asarray(np.ascontiguousarray(array))

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        result: np.ndarray[Any, Any] = self._cupy.asnumpy(array)
        return result

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._cupy.empty(shape, dtype)

    def address(self, array: Any) -> np.uint64:
        if array is None:
            return np.uint64(0)
        if hasattr(array, "data_ptr"):  # torch
            if not array.is_contiguous() or not array.is_cuda:
                raise KernelError("arrays of CUDA kernels must be contiguous, on the GPU")
            return np.uint64(array.data_ptr())
        if not isinstance(array, self._cupy.ndarray) or not array.flags.c_contiguous:
            raise KernelError("arrays of CUDA kernels must be contiguous, on the GPU")
        return np.uint64(array.data.ptr)
