"""Tests that are made by emulation elsewhere, to be run here on a card."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def emulated_tests(name: str, folder: str = "kernels/cuda") -> ModuleType:
    """The module `name` of a folder of tests."""
    path = Path(__file__).parents[1] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"remora_gpu_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def all_of(module: ModuleType, *fixtures: str) -> dict[str, Any]:
    """Its tests and some of its fixtures, to be put among a module's own."""
    return {name: value for name, value in vars(module).items() if name.startswith("test_") or name in fixtures}
