"""A CUDA source file with the macros that make one variant of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from remora.platform.base.errors import KernelError

SOURCE_DIR = Path(__file__).resolve().parent / "src"
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(')
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)

#: Names in the sources: of activations, and of K or V in the arena (src/kv_codec.cuh).
VALUE_TYPES = {"fp32": "float", "bf16": "Bf16"}
KV_FORMATS = {"fp32": "Fp32Rows", "bf16": "Bf16Rows", "int8": "Int8Rows", "int5": "Int5Rows", "int4": "Int4Rows"}


@dataclass(frozen=True, slots=True)
class CudaSource:
    """One variant: file `name`.cu with `macros` defined. Equal variants are equal and hash alike."""

    name: str
    macros: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(name: str, **macros: str | int) -> CudaSource:
        """Raises KernelError when there is no such file."""
        if name not in source_names():
            raise KernelError(f"no CUDA source {name}.cu; there are {', '.join(source_names())}")
        return CudaSource(name, tuple(sorted((key, str(value)) for key, value in macros.items())))

    @property
    def path(self) -> Path:
        return SOURCE_DIR / f"{self.name}.cu"

    def text(self) -> str:
        return read_source(self.path.name)

    def headers(self) -> dict[str, str]:
        """All files that the source includes, also by one another, by name: compilers need no folder of ours."""
        found: dict[str, str] = {}
        waiting = _INCLUDE.findall(self.text())
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = read_source(name)
                waiting.extend(_INCLUDE.findall(found[name]))
        return found

    def kernel_names(self) -> list[str]:
        return _KERNEL.findall(self.text())

    def macro_options(self) -> list[str]:
        return [f"-D{name}={value}" for name, value in self.macros]

    def __str__(self) -> str:
        return f"{self.name}.cu({', '.join(f'{name}={value}' for name, value in self.macros)})"


@cache
def read_source(file_name: str) -> str:
    return (SOURCE_DIR / file_name).read_text(encoding="utf-8")


@cache
def source_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SOURCE_DIR.glob("*.cu")))
