"""Compiles the native kernels with the machine's C++ compiler: `python -m remora.kernels.native.build`.

Level-independent sources are compiled once, the others once per instruction-set level, with that level's flags and
name (src/simd.h says what that asks of a source). hatch_build.py loads this file by path while the package is being
built, so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent / "src"
LIBRARY_NAME = "_remora_cpu.so"
#: For tests: every level compiled for AVX2 or less, with plain C++ in place of the instructions that it lacks.
EMULATED_LIBRARY_NAME = "_remora_cpu_emulated.so"

COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"),
    # Every variant of a kernel must round alike: products are fused only where the source says so.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"),
)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,defs", "-Wl,--exclude-libs,ALL", "-static-libstdc++", "-static-libgcc")
#: "best" compiles the portable level and the best one that this machine runs; default: all that the compiler knows.
LEVELS_VARIABLE = "REMORA_NATIVE_LEVELS"
#: Compiled once; every other source is a level file.
SHARED_SOURCES = frozenset(
    {"api", "api_attention", "attention_plan", "decoder", "dispatch", "model", "packing", "threads"}
)


class BuildError(Exception):
    """The library could not be compiled; the message holds the compiler's last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One instruction-set level: the namespace of its code and how it is compiled."""

    name: str
    vector_bytes: int
    flags: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()

    def compile_flags(self, *, emulate: bool) -> list[str]:
        defines = [f"REMORA_LEVEL={self.name}", f"REMORA_VECTOR_BYTES={self.vector_bytes}", *self.defines]
        flags = self.flags
        if emulate and self.vector_bytes == 64:
            defines.append("REMORA_EMULATE=1")
            flags = _AVX2
        return [*flags, *(f"-D{define}" for define in defines)]


#: x86-64's arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA): some kernels and sandboxes refuse tiles.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512")
X86_LEVELS = (
    Level(name="portable", vector_bytes=16),
    Level(name="avx2", vector_bytes=32, flags=_AVX2),
    Level(name="avx512", vector_bytes=64, flags=_AVX512, defines=("REMORA_VNNI=1",)),
    Level(
        name="avx512bf16",
        vector_bytes=64,
        flags=(*_AVX512, "-mavx512bf16"),
        defines=("REMORA_VNNI=1", "REMORA_DPBF16=1"),
    ),
    Level(
        name="amx",
        vector_bytes=64,
        flags=(*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        defines=("REMORA_VNNI=1", "REMORA_DPBF16=1", "REMORA_TILES=1"),
    ),
)


def find_compiler() -> str:
    """$CXX, else g++, clang++ or c++ on the path. Raises BuildError when there is none."""
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["g++", "clang++", "c++"]:
        if shutil.which(candidate):
            return candidate
    raise BuildError(f"no C++ compiler: {named} is not on the path" if named else "no C++ compiler on the path")


def levels_for(compiler: str, machine: str | None = None) -> list[Level]:
    """Levels of this processor family whose flags the compiler knows; the portable one always."""
    if (machine or platform.machine()).lower() not in ("x86_64", "amd64"):
        return [X86_LEVELS[0]]
    known = []
    for level in X86_LEVELS:
        probe = [compiler, *level.flags, "-fsyntax-only", "-x", "c++", os.devnull]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            known.append(level)
    if os.environ.get(LEVELS_VARIABLE) == "best" and len(known) > 1:
        return [known[0], next(level for level in reversed(known) if _runs_here(compiler, level))]
    return known


def _runs_here(compiler: str, level: Level) -> bool:
    """Whether this machine's processor has the level, and its kernel lets a process use it; the portable one always."""
    native = subprocess.run(
        [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=False
    ).stdout
    needed = [flag for flag in level.flags if not flag.startswith("-mprefer")]
    if any(f"#define __{flag.removeprefix('-m').replace('-', '_').upper()}__ " not in native for flag in needed):
        return False
    return "-mamx-tile" not in needed or ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def build(output: Path, *, emulate: bool = False, jobs: int | None = None) -> Path:
    """Compiles the library to `output`, replacing it at once when all went well. Raises BuildError."""
    compiler = find_compiler()
    levels = list(X86_LEVELS) if emulate else levels_for(compiler)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="remora-build-") as folder:
        objects, commands = [], []
        for source in sorted(SOURCE_DIR.glob("*.cpp")):
            if source.stem in SHARED_SOURCES:
                variants = [("shared", [f"-DREMORA_HAS_{level.name.upper()}=1" for level in levels])]
                variants[0][1].extend(["-DREMORA_EMULATE=1"] if emulate else [])
            else:
                variants = [(level.name, level.compile_flags(emulate=emulate)) for level in levels]
            for variant, flags in variants:
                target = str(Path(folder) / f"{source.stem}.{variant}.o")
                objects.append(target)
                commands.append([compiler, *COMMON_FLAGS, *flags, "-c", str(source), "-o", target])
        # Longest first, so that the cores finish together.
        commands.sort(key=lambda command: -Path(command[-3]).stat().st_size)
        with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as executor:
            list(executor.map(_run, commands))
        linked = output.with_suffix(f".{os.getpid()}.tmp")
        _run([compiler, *LINK_FLAGS, *objects, "-o", str(linked)])
        linked.replace(output)
    return output


def is_stale(output: Path) -> bool:
    """Whether `output` is missing or older than a source."""
    sources = [Path(__file__), *SOURCE_DIR.iterdir()]
    return not output.exists() or output.stat().st_mtime < max(source.stat().st_mtime for source in sources)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    if done.stderr and os.environ.get("REMORA_BUILD_WARNINGS"):
        sys.stderr.write(done.stderr)


def main() -> int:
    """Builds in place; with --emulated the library of tests, beside it; with --if-stale only when sources are newer."""
    emulate = "--emulated" in sys.argv[1:]
    output = SOURCE_DIR.parent / (EMULATED_LIBRARY_NAME if emulate else LIBRARY_NAME)
    if "--if-stale" in sys.argv[1:] and not is_stale(output):
        return 0
    try:
        sys.stdout.write(f"built {build(output, emulate=emulate)}\n")
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
