"""Knowing for certain that a process has ended (design §4.1), on Linux, through pidfds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

from remora.namespaces.commands import ProcessIdentity

logger = logging.getLogger(__name__)


@functools.cache
def boot_id() -> str:
    """Differs after each boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2 is the command in parentheses and may itself hold spaces and parentheses: count from the last one.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def process_identity(pid: int | None = None) -> ProcessIdentity:
    """Identity of a process, of this one by default. Raises ProcessLookupError when it does not exist."""
    pid = os.getpid() if pid is None else pid
    ticks = start_time_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessIdentity(pid=pid, start_time_ticks=ticks, boot_id=boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """False once every thread of that very process has ended, reaped by its parent or not."""
    try:
        with ProcessWatch(identity) as watch:
            return not watch.has_exited()
    except ProcessLookupError:
        return False


class ProcessWatch:
    """A pidfd of one process. It keeps meaning that process, also when the pid is used again."""

    def __init__(self, identity: ProcessIdentity) -> None:
        """Raises ProcessLookupError when the process is already gone."""
        if identity.boot_id != boot_id():
            raise ProcessLookupError(f"process {identity.pid} ran before this boot")
        self.identity = identity
        self._pidfd = os.pidfd_open(identity.pid)
        self._loop: asyncio.AbstractEventLoop | None = None
        # The pidfd now pins one process; only if that one started at the right time is it the one we mean.
        if start_time_ticks(identity.pid) != identity.start_time_ticks:
            self.close()
            raise ProcessLookupError(f"process {identity.pid} is another process by now")

    def __enter__(self) -> ProcessWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has_exited(self) -> bool:
        """True once all threads have ended. A stopped (SIGSTOP) or dying process has not exited."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the process has exited, at most `timeout_s`; says whether it has."""
        return _is_readable(self._pidfd, timeout_s)

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Calls back once on the running loop when the process has exited (also when it already has)."""
        if self._loop is not None:
            raise RuntimeError("on_exit may be asked for once")
        self._loop = asyncio.get_running_loop()

        def exited() -> None:
            self._stop_reading()
            callback()

        self._loop.add_reader(self._pidfd, exited)

    def kill(self) -> None:
        """Sends SIGKILL; no error when the process has already exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def kill_and_wait(self, patience_s: float = 10.0) -> None:
        """Kills the process and returns when its exit is proven, however long that takes.

        A process in an uninterruptible system call dies late; its memory must not be reused before, so this only
        logs every `patience_s` and goes on waiting.
        """
        self.kill()
        started_s = time.monotonic()
        next_log_s = started_s + patience_s
        delay_s = 0.001
        # An own descriptor, because on_exit's callback may close this watch meanwhile.
        pidfd = os.dup(self._pidfd)
        try:
            while not _is_readable(pidfd, 0.0):
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, 0.05)
                if time.monotonic() >= next_log_s:
                    next_log_s += patience_s
                    logger.warning(
                        "process %d does not end %.0f s after SIGKILL; its blocks stay quarantined",
                        self.identity.pid,
                        time.monotonic() - started_s,
                    )
        finally:
            os.close(pidfd)

    def close(self) -> None:
        """Stops watching. The process is left alone."""
        self._stop_reading()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _stop_reading(self) -> None:
        if self._loop is not None and self._pidfd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)


def _is_readable(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
