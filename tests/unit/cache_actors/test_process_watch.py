"""Process identities and proven exits, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from remora.cache_actors.process_watch import ProcessWatch, is_alive, process_identity


def stat_of(process: subprocess.Popen[bytes]) -> bytes:
    return Path(f"/proc/{process.pid}/stat").read_bytes()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_running_process_is_alive_and_a_zombie_is_not(child: subprocess.Popen[bytes]) -> None:
    identity = process_identity(child.pid)
    assert is_alive(identity)
    assert is_alive(process_identity())
    child.kill()
    with ProcessWatch(identity) as watch:
        assert watch.wait(10)
    assert not is_alive(identity), "exited, though its parent has not reaped it"
    child.wait()
    assert not is_alive(identity)


def test_a_reused_pid_or_another_boot_is_another_process(child: subprocess.Popen[bytes]) -> None:
    identity = process_identity(child.pid)
    for other in (
        msgspec.structs.replace(identity, start_time_ticks=identity.start_time_ticks - 1),
        msgspec.structs.replace(identity, boot_id="other"),
    ):
        assert not is_alive(other)
        with pytest.raises(ProcessLookupError):
            ProcessWatch(other)


def test_names_with_spaces_and_parentheses_do_not_confuse_the_start_time() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; open('/proc/self/comm','w').write('a) R 1 (b'); time.sleep(60)"]
    )
    try:
        for _ in range(200):
            before = process_identity(process.pid)
            if b"a) R" in stat_of(process):
                break
            time.sleep(0.02)
        assert process_identity(process.pid) == before
        assert before.start_time_ticks > 10
    finally:
        process.kill()
        process.wait()


async def test_the_exit_is_reported_once_to_the_loop(child: subprocess.Popen[bytes]) -> None:
    calls: list[float] = []
    gone = asyncio.Event()
    watch = ProcessWatch(process_identity(child.pid))
    watch.on_exit(lambda: (calls.append(time.monotonic()), gone.set()))  # type: ignore[func-returns-value]
    await asyncio.sleep(0.05)
    assert not calls
    child.kill()
    await asyncio.wait_for(gone.wait(), 10)
    await asyncio.sleep(0.05)
    assert len(calls) == 1
    watch.close()


async def test_a_stopped_process_has_not_exited_until_it_is_killed(child: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch(process_identity(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    assert not watch.wait(0.1)
    await asyncio.wait_for(watch.kill_and_wait(), 10)
    assert watch.has_exited()
    watch.kill()
    watch.close()
    assert child.wait() == -signal.SIGKILL


def test_a_process_whose_main_thread_ended_still_runs_its_others() -> None:
    script = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)  # exit of this thread alone
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        identity = process_identity(process.pid)
        deadline = time.monotonic() + 10
        while b") Z" not in stat_of(process) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert b") Z" in stat_of(process)
        assert is_alive(identity), "its other threads could still write to shared memory"
    finally:
        process.kill()
        process.wait()
