"""CUDA sources run on the host here; tests/gpu runs the same tests on a card."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.kernels.cuda.host.emulator import HostDevice
from remora.kernels.cuda.host.runtime import EmulatedRuntime

# Makes cuda_world and store_step importable for the tests beside it.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def host_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled once for all tests."""
    return Path(tmp_path_factory.mktemp("cuda-host"))


@pytest.fixture(scope="session")
def device(require: Callable[[str], str], host_cache: Path) -> HostDevice:
    return HostDevice(host_cache, require("g++"))


@pytest.fixture(scope="session")
def runtime(require: Callable[[str], str], host_cache: Path) -> EmulatedRuntime:
    return EmulatedRuntime(host_cache, require("g++"))
