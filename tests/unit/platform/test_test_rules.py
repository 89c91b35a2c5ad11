"""The rules in tests/conftest.py, tried on small suites of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import remora

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
OPTIONS = """
[pytest]
addopts = --import-mode=importlib --strict-markers -ra
markers =
    gpu: needs a GPU
    soak: long
"""


def run_suite(folder: Path, code: str, *arguments: str, require_all: bool = False) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text(OPTIONS)
    (folder / "test_it.py").write_text(f"import os, subprocess, sys\nfrom pathlib import Path\nimport pytest\n{code}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "REMORA_REQUIRE_ALL": "1" if require_all else "0",
            "PYTHONPATH": str(Path(remora.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


SKIPS = """
def test_program(require): require('no-such-program')
def test_call(): pytest.skip('not today')
@pytest.mark.skip(reason='not today')
def test_mark(): pass
def test_data(require_data): require_data('REMORA_TRACES')
@pytest.mark.xfail
def test_expected(): assert False
"""


def test_skips_say_what_is_missing_and_fail_when_everything_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMORA_TRACES", raising=False)
    status, text = run_suite(tmp_path, SKIPS)
    assert status == 0, text
    assert "4 skipped, 1 xfailed" in text
    assert "needs no-such-program" in text
    assert "REMORA_TRACES is not set" in text
    status, text = run_suite(tmp_path, SKIPS, require_all=True)
    assert status == 1, text
    assert "3 failed, 1 xfailed, 1 error" in text
    assert "REMORA_REQUIRE_ALL=1 allows no skip: Skipped: not today" in text


def test_a_module_that_skips_itself_fails_when_everything_is_required(tmp_path: Path) -> None:
    status, text = run_suite(tmp_path, "pytest.skip('not today', allow_module_level=True)", require_all=True)
    assert status == 2, text
    assert "REMORA_REQUIRE_ALL=1 allows no skip: Skipped: not today" in text


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_gpu_and_soak_tests_are_left_out_by_name_even_when_everything_is_required(tmp_path: Path) -> None:
    code = "@pytest.mark.gpu\ndef test_card(): pass\n@pytest.mark.soak\ndef test_long(): pass\ndef test_it(): pass"
    status, text = run_suite(tmp_path, code, require_all=True)
    assert status == 0, text
    assert "1 passed, 2 deselected" in text
    assert "left out (gpu: no NVIDIA GPU here): 1 of test_it.py" in text
    assert "left out (soak: run by `make soak`): 1 of test_it.py" in text


def test_soak_tests_run_when_they_are_asked_for(tmp_path: Path) -> None:
    status, text = run_suite(tmp_path, "@pytest.mark.soak\ndef test_long(): pass\ndef test_it(): pass", "-m", "soak")
    assert status == 0, text
    assert "1 passed, 1 deselected" in text


def test_a_process_that_is_left_behind_fails_the_session_and_is_killed(tmp_path: Path) -> None:
    code = (
        "def test_it():\n"
        "    command = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(100)']\n"
        "    left = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\n"
        "    left.stdout.read(1)  # before it runs, its environment cannot be read\n"
        "    Path('pid').write_text(str(left.pid))"
    )
    status, text = run_suite(tmp_path, code)
    assert status == 1, text
    pid = int((tmp_path / "pid").read_text())
    assert f"LEFT BEHIND: process {pid}" in text
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


def test_shared_memory_that_is_left_behind_fails_the_session_and_is_removed(tmp_path: Path) -> None:
    code = (
        "def test_it():\n"
        "    folder = os.environ['REMORA_SHM_DIR']\n"
        "    Path(folder, 'x').write_text('')\n"
        "    Path('dir').write_text(folder)"
    )
    status, text = run_suite(tmp_path, code)
    assert status == 1, text
    assert "LEFT BEHIND: shared memory" in text
    assert not Path((tmp_path / "dir").read_text()).exists()


def test_what_several_processes_leave_out_and_behind_is_said_by_the_one_that_started_them(tmp_path: Path) -> None:
    code = (
        "@pytest.mark.soak\ndef test_long(): pass\n"
        "@pytest.mark.parametrize('number', range(2))\n"
        "def test_it(number): Path(os.environ['REMORA_SHM_DIR'], 'x').write_text('')"
    )
    status, text = run_suite(tmp_path, code, "--numprocesses", "2")
    assert status == 1, text
    assert "2 passed" in text
    assert "left out (soak: run by `make soak`): 1 of test_it.py" in text
    assert text.count("LEFT BEHIND: shared memory") == 2


def test_a_session_has_state_of_its_own(tmp_path: Path) -> None:
    code = (
        "def test_it():\n"
        "    from remora.platform.base import paths\n"
        "    assert str(paths.SHARED_MEMORY_DIR) == os.environ['REMORA_SHM_DIR'] != '/outside'\n"
        "    assert str(paths.default_state_dir()) == os.environ['REMORA_STATE_DIR'] != '/outside'\n"
        "    assert 'RAY_ADDRESS' not in os.environ"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("REMORA_SHM_DIR", "REMORA_STATE_DIR", "RAY_ADDRESS"):
            patch.setenv(name, "/outside")
        status, text = run_suite(tmp_path, code)
    assert status == 0, text
