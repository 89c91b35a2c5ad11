"""CUDA sources run on the host here; tests/gpu runs the same tests on a card."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.kernels.cuda.host.emulator import HostDevice

# Makes cuda_world and store_step importable for the tests beside it.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def device(require: Callable[[str], str], host_cache: Path) -> HostDevice:
    return HostDevice(host_cache, require("g++"))
