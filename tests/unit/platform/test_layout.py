"""The shape of the repository: what packaging, imports and the style page ask for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("platform", "deployments", "cache_actors", "kernels", "namespaces")
MAX_LINES = 400


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_is_a_regular_package_that_would_shadow_another(room: str) -> None:
    assert not (ROOT / room / "__init__.py").exists()
    assert (ROOT / ".src" / "remora" / room).resolve() == ROOT / room


@pytest.mark.parametrize(
    "code",
    [
        "import platform; print(platform.system())",
        "import transformers; print(transformers.LlamaForCausalLM.__name__)",
        "import ray; print(ray.__version__)",
    ],
)
def test_other_packages_import_from_the_repository_root(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name() -> None:
    code = "from transformers.utils import is_kernels_available; raise SystemExit(is_kernels_available())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0


def test_no_source_file_is_longer_than_the_limit() -> None:
    long = {
        str(path.relative_to(ROOT)): num_lines
        for room in (*ROOMS, "tests")
        for suffix in ("*.py", "*.cpp", "*.h", "*.cu")
        for path in (ROOT / room).rglob(suffix)
        if (num_lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


@pytest.mark.parametrize("command", [[sys.executable, "-m", "pytest"], [str(Path(sys.executable).with_name("pytest"))]])
def test_pytest_runs_from_the_repository_root(command: list[str]) -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "--co", "tests/unit/platform/test_layout.py"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
