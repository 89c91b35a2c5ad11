"""However the platform's process ends, the supervisor clears up; a terminal's signals reach the platform once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remora.cache_actors.process_watch import start_time_ticks

#: `sys.argv[1]` is a file for the platform's pid; what each process does is printed.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from remora.platform.base.errors import RemoraError
from remora.platform.cli.supervisor import STOP_SIGNALS, run_supervised

def platform():
    def stop(number, frame):
        print("signal", flush=True)
        for _ in range(5):
            time.sleep(0.1)
        sys.exit(3)
    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    Path(sys.argv[1]).write_text(str(os.getpid()))
    BODY
    return 0

try:
    code = run_supervised(platform, lambda: print("cleared", flush=True))
except RemoraError as error:
    print(error, flush=True)
    code = 1
print("end", flush=True)
sys.exit(code)
"""


class Supervised:
    def __init__(self, folder: Path, body: str) -> None:
        self._file = folder / "pid"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("BODY", body), str(self._file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def platform_pid(self) -> int:
        while not (self._file.exists() and self._file.read_text()):
            assert self.process.poll() is None, self.process.stdout
            time.sleep(0.01)
        return int(self._file.read_text())

    def end(self) -> tuple[int, list[str]]:
        output = self.process.communicate(timeout=30)[0]
        return self.process.returncode, output.splitlines()


@pytest.mark.parametrize(
    ("body", "code", "lines"),
    [
        ("pass", 0, ["cleared", "end"]),
        ("sys.exit(7)", 7, ["cleared", "end"]),
        ("raise RemoraError('no room')", 1, ["remora: no room", "cleared", "end"]),
    ],
)
def test_the_exit_code_is_the_platforms(tmp_path: Path, body: str, code: int, lines: list[str]) -> None:
    assert Supervised(tmp_path, body).end() == (code, lines)


def test_a_bug_in_the_platform_shows_its_traceback_and_is_cleared_up(tmp_path: Path) -> None:
    code, lines = Supervised(tmp_path, "1 / 0").end()
    assert code == 1
    assert "ZeroDivisionError: division by zero" in lines
    assert lines[-2:] == ["cleared", "end"]


@pytest.mark.parametrize("number", ["SIGABRT", "SIGKILL"])
def test_a_platform_that_dies_is_named_and_cleared_up(tmp_path: Path, number: str) -> None:
    code, lines = Supervised(tmp_path, f"os.kill(os.getpid(), signal.{number})").end()
    assert code == 1
    assert lines == ["cleared", f"the process that ran the platform ended by {number}; everything was stopped", "end"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_of_a_terminal_reach_the_platform_once(tmp_path: Path, number: signal.Signals) -> None:
    supervised = Supervised(tmp_path, "time.sleep(60)")
    supervised.platform_pid()
    for _ in range(3):
        os.killpg(supervised.process.pid, number)
        time.sleep(0.05)
    assert supervised.end() == (3, ["signal", "cleared", "end"])


def test_a_platform_whose_supervisor_is_killed_ends_by_itself(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "time.sleep(60)")
    pid = supervised.platform_pid()
    supervised.process.kill()
    code, lines = supervised.end()
    assert (code, lines) == (-9, ["signal"])
    deadline_s = time.monotonic() + 5
    while start_time_ticks(pid) is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert start_time_ticks(pid) is None or "Z" in Path(f"/proc/{pid}/stat").read_text()
