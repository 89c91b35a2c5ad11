"""Tests that are made by emulation elsewhere, to be run here on a card."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from module_file import load_module


def emulated_tests(name: str, folder: str = "kernels/cuda") -> ModuleType:
    """The module `name` of a folder of tests."""
    return load_module(Path(__file__).parents[1] / folder / f"{name}.py", f"remora_gpu_{name}")


def all_of(module: ModuleType, *fixtures: str) -> dict[str, Any]:
    """Its tests and some of its fixtures, to be put among a module's own."""
    return {name: value for name, value in vars(module).items() if name.startswith("test_") or name in fixtures}
