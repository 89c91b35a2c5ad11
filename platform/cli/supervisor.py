"""`remora up` is two processes: one that runs the platform, and one that only waits and clears up.

    remora up (terminal's process group) ── fork ──► platform (a session of its own) ──► Ray and everything else
      Ctrl-C, SIGTERM, SIGHUP ── SIGTERM ──►           ends in order
      waits, then clears what is left       ◄── exits, aborts, is killed

Ray's processes must not see a terminal's signals: they would end before the platform could, and Ray aborts a driver
whose cluster is gone. Only a kill -9 of both processes leaves anything behind, and then the next `up` clears it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from remora.platform.base.errors import RemoraError

#: What a terminal, `kill` and `remora down` send.
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PR_SET_PDEATHSIG = 1
#: The platform's own end takes at most a minute; after that it is killed.
_PATIENCE_S = 90


class PlatformDied(RemoraError):
    """The process that ran the platform ended by a signal; everything else was stopped."""

    code = "platform_died"


def run_supervised(platform: Callable[[], int], clear_up: Callable[[], None]) -> int:
    """Runs `platform` in a child process and returns its exit code; `clear_up` follows in this process, always.

    A signal to stop is passed on once, as SIGTERM. The child starts with STOP_SIGNALS blocked, and must install its
    handlers itself. Raises PlatformDied when the child ended by a signal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child == 0:
        _run_child(platform)
    passed_on = False

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        nonlocal passed_on
        if not passed_on:
            passed_on = True
            os.kill(child, signal.SIGTERM)
            signal.alarm(_PATIENCE_S)

    def lose_patience(_number: int, _frame: FrameType | None) -> None:
        os.kill(child, signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lose_patience)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        # The child is reaped after this, so that its pid stays its own while signals are passed on.
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.alarm(0)
        _, status = os.waitpid(child, 0)
        clear_up()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        raise PlatformDied(
            f"the process that ran the platform ended by {signal.Signals(-code).name}; everything was stopped"
        )
    return code


def _run_child(platform: Callable[[], int]) -> None:
    """Never returns: what follows a fork in the caller is the parent's."""
    code = 1
    try:
        os.setsid()
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            code = platform()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except RemoraError as error:
        sys.stderr.write(f"remora: {error}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
