"""Finding and ending the processes of one instance, and only those.

Every process of an instance inherits a random value in its environment. A process that carries it is provably ours,
whoever its parent is by now; it is signalled through a pidfd that was opened before the value was read, so that a pid
that has been used again is never hit.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

from remora.cache_actors.process_watch import ProcessWatch, process_identity
from remora.namespaces.commands import ProcessIdentity

#: Carries the instance's id.
INSTANCE_VARIABLE = "REMORA_INSTANCE"


def marked_processes(variable: str, value: str) -> list[ProcessIdentity]:
    """Living processes of this user that were started with `variable=value`, without this one and its ancestors."""
    mark = f"{variable}={value}".encode()
    spared = _self_and_ancestors()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        # The identity is taken first: if the pid changes hands before the mark is read, the two do not fit and
        # ProcessWatch refuses the identity later.
        with contextlib.suppress(OSError):
            identity = process_identity(int(entry.name))
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(identity)
    return found


def kill_processes(processes: Collection[ProcessIdentity], *, timeout_s: float = 10.0) -> list[ProcessIdentity]:
    """Sends SIGKILL to each and waits until they are gone; returns those that were not within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        watches = []
        for identity in processes:
            with contextlib.suppress(ProcessLookupError):
                watches.append(stack.enter_context(ProcessWatch(identity)))
        for watch in watches:
            watch.kill()
        return [watch.identity for watch in watches if not watch.wait(deadline_s - time.monotonic())]


def kill_marked(variable: str, value: str, *, rounds: int = 5) -> list[ProcessIdentity]:
    """Kills every process that carries the mark, until none is left; returns those killed."""
    killed: list[ProcessIdentity] = []
    for _ in range(rounds):
        found = marked_processes(variable, value)
        if not found:
            break
        kill_processes(found)
        killed += [identity for identity in found if identity not in killed]
    return killed


def command_of(pid: int) -> str:
    """Command line of a process for messages, shortened; its pid when it is gone."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        line = ""
    return line[:80] or f"process {pid}"


def _self_and_ancestors() -> set[int]:
    pids = {os.getpid()}
    pid = os.getppid()
    while pid > 1 and pid not in pids:
        pids.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            break
        pid = int(stat[stat.rindex(b")") + 2 :].split()[1])
    return pids
