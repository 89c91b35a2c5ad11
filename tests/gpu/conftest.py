"""A real card. The root conftest leaves these tests out by name where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from remora.kernels.cuda.card import CardRuntime
from remora.kernels.cuda.module import CupyDevice

# The tests of the emulation run here too: makes what they share importable.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("kernels", "kernels/cuda", "engine", "gpu")]


@pytest.fixture(scope="session")
def cubin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("cubins"))


@pytest.fixture(scope="session")
def device(cubin_dir: Path) -> CupyDevice:
    return CupyDevice(cubin_dir)


@pytest.fixture(scope="session")
def runtime(cubin_dir: Path) -> CardRuntime:
    return CardRuntime(cubin_dir)
