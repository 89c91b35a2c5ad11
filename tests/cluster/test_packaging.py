"""What `pip install .` installs, from source archive to wheel, used where folders have the same names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("platform", "deployments", "cache_actors", "kernels", "namespaces")


#: Python, data files, and the CUDA sources that a card's first use compiles.
_SHIPPED = (".py", ".yaml", ".html", ".css", ".js", ".svg", ".cu", ".cuh")


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # One instruction-set level compiles in a fraction of the time.
    environment["REMORA_NATIVE_LEVELS"] = "best"
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sources() -> set[str]:
    """Names in the wheel of everything that is in the rooms now, before it is built."""
    return {
        f"remora/{path.relative_to(ROOT)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in _SHIPPED and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(sources: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, not from the checkout, as a package index's users would."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "source", filter="fully_trusted")
    (source,) = (folder / "source").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel, and everything else from this environment but the checkout."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site_packages)
    # Folders named in a .pth file are searched, but .pth files in them, such as an editable install's, are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def test_the_wheel_holds_every_module_and_data_file(sources: set[str], wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        packed = set(file.namelist())
    assert sources <= packed
    assert "remora/py.typed" in packed
    assert "remora/kernels/native/_remora_cpu.so" in packed or find_compiler() is None
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    assert not any(name.startswith(("tests/", "remora/tests", "docs/")) for name in packed)


def test_without_a_compiler_a_wheel_for_any_processor_is_built_and_says_what_will_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(built) as file:
        assert not any(name.endswith(".so") for name in file.namelist())
    assert "no-such-compiler is not on the path" in done.stderr
    assert "The slower torch fallback will be used" in done.stderr


def test_the_installed_package_works_in_the_repository_root(python: Path) -> None:
    code = (
        "import platform, remora, transformers; print(platform.system(), remora.__file__)\n"
        "import remora.platform.base.config, remora.deployments.router, remora.cache_actors.arena\n"
        "import remora.kernels.base, remora.namespaces.pool"
    )
    system, file = run(python, "-c", code, cwd=ROOT).split()
    assert system == "Linux"
    assert Path(file).is_relative_to(python.parents[1])


def test_its_command_line_finds_its_default_configuration(python: Path, tmp_path: Path) -> None:
    code = "from remora.platform.cli.up import DEFAULT_CONFIG; print(DEFAULT_CONFIG)"
    path = run(python, "-c", code, cwd=tmp_path).strip()
    module = ("-m", "remora.platform.cli.main")
    assert "2 models" in run(python, *module, "validate", "--no-models", path, cwd=tmp_path)
    assert run(python, *module, "--version", cwd=tmp_path).strip().endswith("0.1.0")


def test_ray_workers_started_in_the_repository_root_import_it(python: Path) -> None:
    code = """
from pathlib import Path
from remora.platform.base.local_ray import new_temp_dir, start_local_ray, stop_local_ray
folder = new_temp_dir()
start_local_ray(folder, namespace="packaging", num_cpus=1, object_store_bytes=100 * 1024 * 1024)
import ray

@ray.remote
def where():
    import platform
    import remora.namespaces.pool
    return platform.system(), remora.namespaces.pool.__file__

print(*ray.get(where.remote()))
stop_local_ray(folder)
"""
    system, file = run(python, "-c", code, cwd=ROOT).split()[-2:]
    assert system == "Linux"
    assert Path(file).is_relative_to(python.parents[1])
