"""A real card. The root conftest leaves these tests out by name where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from remora.kernels.cuda.module import CupyDevice

# The tests of the emulation run here too: makes what they share importable.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("kernels", "kernels/cuda", "gpu")]


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> CupyDevice:
    return CupyDevice(Path(tmp_path_factory.mktemp("cubins")))
