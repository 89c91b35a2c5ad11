"""Compiles the native kernels while the package is being built, and puts them into the wheel.

Without a compiler, or when compiling fails, the package is built all the same and runs on its torch fallback.
`REMORA_SKIP_NATIVE=1` leaves the kernels out on purpose (a pure Python wheel).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Below the package root: a link in a checkout, real folders in a source archive, which follows links.
_NATIVE_DIR = Path("remora") / "kernels" / "native"
_PACKAGE_ROOT = ".src"


class NativeKernelsHook(BuildHookInterface):  # type: ignore[misc]
    """[tool.hatch.build.targets.wheel.hooks.custom] of pyproject.toml; runs for wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("REMORA_SKIP_NATIVE") == "1":
            return
        native_build = _load_build_module(Path(self.root))
        in_place = Path(self.root) / _PACKAGE_ROOT / _NATIVE_DIR / native_build.LIBRARY_NAME
        try:
            if version == "editable":
                if native_build.is_stale(in_place):
                    native_build.build(in_place)
            else:
                # Compiled anew: what lies in place may be for this machine's processor only.
                library = native_build.build(Path(self._temporary_dir()) / in_place.name)
                target = _NATIVE_DIR / in_place.name
                build_data["force_include"][str(library)] = target.as_posix()
        except native_build.BuildError as error:
            if version == "editable":
                in_place.unlink(missing_ok=True)  # of older sources
            self.app.display_warning(
                f"Remora's native kernels were not compiled: {error}\nThe slower torch fallback will be used. "
                "For the fast one install a C++ compiler (g++ or clang++) and reinstall."
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def _temporary_dir(self) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="remora-wheel-")
        return self._folder.name


def _platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _load_build_module(root: Path) -> Any:
    """kernels/native/build.py, which cannot be imported by name before the package is installed."""
    path = root / _PACKAGE_ROOT / _NATIVE_DIR / "build.py"
    spec = importlib.util.spec_from_file_location("remora_native_build", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
