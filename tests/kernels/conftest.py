"""Native kernels at every instruction-set level: really where the processor has it, else by emulation."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.kernels.native import build
from remora.kernels.native.library import LEVELS, LIBRARY_VARIABLE, NativeLibrary

# Makes kv_world and paged_world importable for the tests beside it.
sys.path.append(str(Path(__file__).parent))


def _up_to_date(library: Path) -> bool:
    newest = max(source.stat().st_mtime for source in (*build.SOURCE_DIR.iterdir(), Path(build.__file__)))
    return library.exists() and library.stat().st_mtime >= newest


@pytest.fixture(scope="session")
def native_library(require: Callable[[str], str]) -> Callable[[bool], Path]:
    """`native_library(emulated)` is the path of that build of the library, compiled where it is missing or old."""
    ready: dict[bool, Path] = {}

    def find_or_build(emulated: bool) -> Path:
        if emulated not in ready:
            name = build.EMULATED_LIBRARY_NAME if emulated else build.LIBRARY_NAME
            path = build.SOURCE_DIR.parent / name
            if not _up_to_date(path):
                require("g++")
                lock = os.open(path.parent, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _up_to_date(path):  # another process of the same run may have built it meanwhile
                    build.build(path, emulate=emulated)
                os.close(lock)
            ready[emulated] = path
        return ready[emulated]

    return find_or_build


@pytest.fixture(params=LEVELS)
def level(
    request: pytest.FixtureRequest, native_library: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Each level in turn, with the library that runs it here in force for the test."""
    name: str = request.param
    path = native_library(False)
    if name not in NativeLibrary(path).available_levels():
        path = native_library(True)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(path))
    return name
