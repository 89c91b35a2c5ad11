"""The decoder, and an engine over it, on a card: the comparisons that are made elsewhere by emulation."""

from __future__ import annotations

import pytest
from emulated_tests import all_of, emulated_tests

pytestmark = pytest.mark.gpu

globals().update(all_of(emulated_tests("test_cuda_decoder")))
globals().update(all_of(emulated_tests("test_cuda_llama", "engine"), "models", "pair"))
