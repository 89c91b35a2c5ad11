"""CUDA sources run on the host here; tests/gpu runs the same tests on a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from remora.kernels.cuda.host.emulator import HostDevice


@pytest.fixture(scope="session")
def device(require: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    compiler = require("g++")
    return HostDevice(Path(tmp_path_factory.mktemp("cuda-host")), compiler)
