"""A kernels.cuda.device.Device on the processor: the same sources, compiled by g++ behind shim.h. For tests only."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from remora.kernels.cuda.device import Grid
from remora.kernels.cuda.source import SOURCE_DIR, CudaSource
from remora.platform.base.errors import KernelError

_HOST_DIR = Path(__file__).resolve().parent
#: No contraction: as --fmad=false on a card.
_OPTIONS = ["-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fno-exceptions", "-fPIC", "-w"]
_SHIM = "shim.h"
_LAUNCHER = """
extern "C" const char* emulate_{0}(const unsigned* grid, const unsigned* block, size_t shared_bytes,
                                   const uint64_t* slots, int num_slots) {{
  return remora_shim::launch({0}, grid, block, shared_bytes, slots, num_slots);
}}
"""


def _key(files: list[Path], *others: object) -> str:
    contents = b"\0".join(path.read_bytes() for path in sorted(files))
    return hashlib.blake2b(contents + repr((others, _OPTIONS)).encode(), digest_size=12).hexdigest()


@cache
def _machine(compiler: str) -> str:
    """What decides, besides the source and the options, which code the compiler makes here (-march=native)."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    kinds = {line for line in cpuinfo.splitlines() if line.startswith(("model name", "flags", "CPU part", "Features"))}
    return repr((version, sorted(kinds)))


class HostDevice:
    """Compiles each variant once into `cache_dir`, the shim once; launches run to their end before they return."""

    num_processors = 4

    def __init__(self, cache_dir: Path, compiler: str = "g++") -> None:
        self._cache_dir = cache_dir
        self._compiler = compiler
        self._libraries: dict[CudaSource, ctypes.CDLL] = {}

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
        """Raises KernelError for what the shim detects: divergent barriers, writes beyond shared memory."""
        if 0 in grid:
            return
        library = self._libraries.get(source)
        if library is None:
            library = self._libraries[source] = ctypes.CDLL(str(self._compile(source)))
        slots = np.zeros(len(arguments), np.uint64)
        for index, argument in enumerate(arguments):
            slots[index : index + 1].view(np.uint8)[: argument.nbytes] = np.frombuffer(argument.tobytes(), np.uint8)
        function = getattr(library, f"emulate_{kernel}")
        function.restype = ctypes.c_char_p
        problem = function(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(threads, 1, 1),
            ctypes.c_size_t(shared_bytes),
            slots.ctypes.data_as(ctypes.c_void_p),
            len(slots),
        )
        if problem is not None:
            raise KernelError(f"{source} {kernel}: {problem.decode()}")

    def prepare(self, source: CudaSource) -> None:
        """Nothing: a test compiles what it launches."""

    def _compile(self, source: CudaSource) -> Path:
        text = f'#include "{_SHIM}"\n#include "{source.path}"\n'
        text += "".join(_LAUNCHER.format(name) for name in source.kernel_names())
        files = [source.path, *SOURCE_DIR.glob("*.cuh"), *_HOST_DIR.glob("*.h")]
        target = self._cache_dir / f"{source.name}-{_key(files, text, source.macros, _machine(self._compiler))}.so"
        if not target.exists():
            headers = self._compiled_shim()
            options = [*source.macro_options(), f"-I{headers}", f"-I{_HOST_DIR}", f"-I{SOURCE_DIR}", "-shared"]
            self._run(target, [*options, "-x", "c++", "-"], text, str(source))
        return target

    def _compiled_shim(self) -> Path:
        """A folder with the shim as a compiled header: half of what a small source costs is reading headers."""
        folder = self._cache_dir / f"shim-{_key(list(_HOST_DIR.glob('*.h')), _machine(self._compiler))}"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{_SHIM}.gch"
        if not target.exists():
            self._run(target, ["-x", "c++-header", str(_HOST_DIR / _SHIM)], "", _SHIM)
        return folder

    def _run(self, target: Path, arguments: list[str], text: str, what: str) -> None:
        """Raises KernelError with the compiler's words."""
        temporary = target.with_suffix(f".{os.getpid()}")
        command = [self._compiler, *_OPTIONS, *arguments, "-o", str(temporary)]
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if result.returncode:
            raise KernelError(f"{what} does not compile for the host:\n{result.stderr[-4000:]}")
        temporary.rename(target)

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        return np.ascontiguousarray(array).copy()

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Filled with 0xff bytes: NaN, as fresh device memory may be."""
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        return array

    def address(self, array: Any) -> np.uint64:
        if array is None:
            return np.uint64(0)
        if hasattr(array, "data_ptr"):  # torch
            if not array.is_contiguous() or array.is_cuda:
                raise KernelError("arrays of emulated kernels must be contiguous, in host memory")
            return np.uint64(array.data_ptr())
        if not array.flags.c_contiguous:
            raise KernelError("arrays of CUDA kernels must be contiguous")
        return np.uint64(array.ctypes.data)
