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
def device(require: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    compiler = require("g++")
    return HostDevice(Path(tmp_path_factory.mktemp("cuda-host")), compiler)
