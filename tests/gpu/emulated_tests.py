"""Tests that are made by emulation elsewhere, to be run here on a card."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def emulated_tests(name: str) -> ModuleType:
    """The module `name` of tests/kernels/cuda."""
    path = Path(__file__).parents[1] / "kernels" / "cuda" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"remora_gpu_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
