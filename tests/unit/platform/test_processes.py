"""Only processes that carry the mark are found and killed, whatever became of their parents."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from remora.cache_actors.process_watch import is_alive, process_identity
from remora.platform.cli.processes import command_of, kill_marked, kill_processes, marked_processes

VARIABLE = "REMORA_TEST_MARK"
SLEEP = "import time; time.sleep(60)"


def start(mark: str, code: str = SLEEP) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: mark}, stdout=subprocess.PIPE, text=True
    )


def test_marked_processes_are_killed_and_others_live() -> None:
    mark, other = secrets.token_hex(8), secrets.token_hex(8)
    mine, foreign = start(mark), start(other)
    try:
        assert [identity.pid for identity in kill_marked(VARIABLE, mark)] == [mine.pid]
        assert mine.wait(5) == -9
        assert foreign.poll() is None
        assert marked_processes(VARIABLE, mark) == []
    finally:
        kill_marked(VARIABLE, other)
        foreign.wait(5)


def test_an_orphan_is_found_by_its_mark() -> None:
    mark = secrets.token_hex(8)
    parent = start(mark, f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid)")
    assert parent.stdout is not None
    orphan = process_identity(int(parent.stdout.readline()))
    parent.wait(30)
    assert marked_processes(VARIABLE, mark) == [orphan]
    kill_marked(VARIABLE, mark)
    assert not is_alive(orphan)


def test_a_mark_that_is_only_a_prefix_is_another() -> None:
    mark = secrets.token_hex(8)
    process = start(mark + "0")
    try:
        assert marked_processes(VARIABLE, mark) == []
    finally:
        kill_marked(VARIABLE, mark + "0")
        process.wait(5)


def test_a_pid_of_another_process_is_not_killed() -> None:
    process = start("x")
    identity = process_identity(process.pid)
    stale = type(identity)(pid=process.pid, start_time_ticks=identity.start_time_ticks - 1, boot_id=identity.boot_id)
    kill_processes([stale])
    time.sleep(0.1)
    assert process.poll() is None
    kill_processes([identity])
    assert process.wait(5) == -9


def test_this_process_and_its_ancestors_are_spared() -> None:
    environment = Path("/proc/self/environ").read_text().split("\0")
    name, value = next(entry.split("=", 1) for entry in environment if entry.startswith("PATH="))
    spared = {os.getpid(), os.getppid()}
    assert not spared & {identity.pid for identity in marked_processes(name, value)}


def test_a_command_line_is_shortened_and_a_gone_process_has_its_pid() -> None:
    assert len(command_of(os.getpid())) <= 80
    assert command_of(2**22 - 1) == f"process {2**22 - 1}"
