"""The decoder on a card: the comparisons that tests/kernels/cuda makes by emulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_tests import emulated_tests

from remora.kernels.cuda.card import CardRuntime

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> CardRuntime:
    return CardRuntime(Path(tmp_path_factory.mktemp("cubins")))


globals().update(
    {name: value for name, value in vars(emulated_tests("test_cuda_decoder")).items() if "test_" in name[:5]}
)
