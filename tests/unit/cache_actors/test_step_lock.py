"""The step lock between real processes: exclusion, shares by weight, crashes, and the cost of nothing to do."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.cache_actors.step_lock import StepLock

WORKER = """
import fcntl, json, os, sys, time
from pathlib import Path
from remora.cache_actors.step_lock import StepLock
path, weight, hold_s, gap_s, until_s = Path(sys.argv[1]), *map(float, sys.argv[2:6])
lock = StepLock(path, weight=weight, group=sys.argv[6] if len(sys.argv) > 6 else "")
print("ready", flush=True)
sys.stdin.readline()
witness = os.open(f"{path}.witness", os.O_CREAT | os.O_RDWR)
turns, held_s, overlaps, longest_wait_s = 0, 0.0, 0, 0.0
end_s = time.monotonic() + until_s
while time.monotonic() < end_s:
    asked_s = time.monotonic()
    with lock.turn():
        start_s = time.monotonic()
        longest_wait_s = max(longest_wait_s, start_s - asked_s)
        try:
            fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            overlaps += 1
        time.sleep(hold_s)
        fcntl.flock(witness, fcntl.LOCK_UN)
        held_s += time.monotonic() - start_s
        turns += 1
    if gap_s:
        time.sleep(gap_s)
print(json.dumps(dict(turns=turns, held_s=held_s, overlaps=overlaps, longest_wait_s=longest_wait_s)), flush=True)
"""
#: Takes the turn, says so, and keeps it.
HOLDER = """
import sys, time
from pathlib import Path
from remora.cache_actors.step_lock import StepLock
lock = StepLock(Path(sys.argv[1]))
lock.acquire()
print("ready", flush=True)
time.sleep(60)
"""


class Children:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[subprocess.Popen[str]] = []

    def start(self, script: str, *arguments: float | str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(self.path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.all.append(child)
        return child

    def run(self, *workers: tuple[float | str, ...]) -> list[dict[str, float]]:
        """Each worker: weight, seconds held, seconds between, seconds in total, and its group if it has one. Returns
        what each counted."""
        children = [self.start(WORKER, *worker) for worker in workers]
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        return [json.loads(child.communicate(timeout=60)[0]) for child in children]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path / "cpu0.steplock")
    yield started
    for child in started.all:
        child.kill()
        child.communicate()


def test_turns_of_several_processes_never_overlap(children: Children) -> None:
    results = children.run(*[(weight, 0.001, 0.0, 1.5) for weight in (1, 1, 2, 5)])
    assert sum(result["overlaps"] for result in results) == 0
    assert all(result["turns"] > 0 for result in results)


@pytest.mark.parametrize(
    # The first are away between two turns for as long as an engine takes to sample and to send.
    ("weights", "holds", "gap_s", "least_use"),
    [((3, 1), (0.012, 0.012), 0.003, 0.65), ((2, 1, 1), (0.005, 0.012, 0.005), 0.0002, 0.8)],
)
def test_busy_processes_share_time_by_weight_whatever_their_step_lengths(
    children: Children, weights: tuple[float, ...], holds: tuple[float, ...], gap_s: float, least_use: float
) -> None:
    # Shares are only as exact as the machine lets processes run when it is their turn: on a busy one, try again. How
    # exact they are on a quiet one says bench_shares.py.
    for attempt in range(4):
        results = children.run(*[(weight, hold, gap_s, 3.0) for weight, hold in zip(weights, holds, strict=True)])
        total = sum(result["held_s"] for result in results)
        shares = [result["held_s"] / total for result in results]
        expected = [weight / sum(weights) for weight in weights]
        # Keeping the device free for the favoured one must not waste it.
        if shares == pytest.approx(expected, rel=0.1) and total > 3.0 * least_use:
            return
        print(f"attempt {attempt}: shares {shares}, used {total:.2f} of 3 s")
    assert shares == pytest.approx(expected, rel=0.1)
    assert total > 3.0 * least_use


def test_participants_of_a_group_have_one_share_together(children: Children) -> None:
    for attempt in range(4):
        results = children.run(*[(1, 0.004, 0.0002, 2.0, group) for group in ("model", "model", "other")])
        held_s = [result["held_s"] for result in results]
        share = held_s[2] / sum(held_s)
        if share == pytest.approx(0.5, rel=0.1) and sum(held_s) > 2.0 * 0.8:
            break
        print(f"attempt {attempt}: held {held_s}")
    assert share == pytest.approx(0.5, rel=0.1)
    assert held_s[0] == pytest.approx(held_s[1], rel=0.3)


def test_no_process_waits_for_ever_behind_a_heavy_one(children: Children) -> None:
    heavy, light = children.run((1000, 0.005, 0.0, 4.0), (0.01, 0.005, 0.0, 4.0))
    assert light["turns"] >= 2
    assert light["longest_wait_s"] < 1.5
    assert heavy["held_s"] > 3.0


def test_the_device_is_not_kept_free_for_a_process_that_is_rarely_there(children: Children) -> None:
    rare, busy = children.run((10, 0.001, 0.1, 2.0), (1, 0.001, 0.0, 2.0))
    assert busy["held_s"] > 1.4
    assert rare["longest_wait_s"] < 0.1


def test_a_holder_that_is_killed_does_not_hang_the_others(children: Children) -> None:
    holder = children.start(HOLDER)
    assert holder.stdout.readline() == "ready\n"
    lock = StepLock(children.path)
    killer = threading.Timer(0.3, holder.kill)
    killer.start()
    start_s = time.monotonic()
    with lock.turn():
        waited_s = time.monotonic() - start_s
    assert 0.25 < waited_s < 1.0
    lock.check_integrity()


def test_a_waiter_that_is_killed_is_skipped_and_its_slot_is_reused(children: Children) -> None:
    lock = StepLock(children.path)
    with lock.turn():
        waiters = [children.start(HOLDER) for _ in range(3)]
        deadline_s = time.monotonic() + 20
        while len([use for use in lock.usage() if use.state == "waiting"]) < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        for waiter in waiters[:2]:
            waiter.kill()
            waiter.wait()
    assert waiters[2].stdout.readline() == "ready\n", "the living one got the turn"
    waiters[2].kill()
    waiters[2].wait()
    with lock.turn():
        pass
    others = [StepLock(children.path) for _ in range(63)]
    assert len(lock.usage()) == 64, "the slots of the dead are free again"
    with pytest.raises(OSError, match="64 slots"):
        StepLock(children.path)
    for other in others:
        other.close()


def test_a_stopped_holder_loses_its_turn_after_the_patience(children: Children) -> None:
    holder = children.start(HOLDER)
    assert holder.stdout.readline() == "ready\n"
    os.kill(holder.pid, signal.SIGSTOP)
    lock = StepLock(children.path, patience_s=0.4)
    start_s = time.monotonic()
    with lock.turn():
        assert time.monotonic() - start_s < 2.0
    lock.check_integrity()


def test_crashes_at_random_moments_leave_a_lock_that_works(children: Children) -> None:
    lock = StepLock(children.path)
    for round_no in range(12):
        victim = children.start(WORKER, 1, 0.0, 0.0, 30)
        assert victim.stdout.readline() == "ready\n"
        victim.stdin.write("go\n")
        victim.stdin.flush()
        end_s = time.monotonic() + 0.01 + 0.007 * round_no
        while time.monotonic() < end_s:
            with lock.turn():
                pass
        victim.kill()
        with lock.turn():
            lock.check_integrity()
        victim.communicate()
    with lock.turn():
        assert [use.state for use in lock.usage()].count("holding") == 1


def test_an_idle_neighbour_costs_nothing_and_a_free_turn_takes_microseconds(children: Children) -> None:
    lock, neighbour = StepLock(children.path), StepLock(children.path, weight=100)
    with neighbour.turn():
        pass
    durations = []
    for _ in range(20):
        start_s = time.perf_counter()
        for _ in range(100):
            with lock.turn():
                pass
        durations.append((time.perf_counter() - start_s) / 100)
    print(f"uncontended turn: {min(durations) * 1e6:.1f} µs")
    assert min(durations) < 100e-6


def test_a_blocked_waiter_sleeps(children: Children) -> None:
    holder = children.start(HOLDER)
    assert holder.stdout.readline() == "ready\n"
    lock = StepLock(children.path)
    threading.Timer(1.0, holder.kill).start()
    before = resource.getrusage(resource.RUSAGE_THREAD)
    with lock.turn():
        after = resource.getrusage(resource.RUSAGE_THREAD)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05


def test_a_turn_ends_with_its_context_also_by_an_exception(children: Children) -> None:
    lock = StepLock(children.path)
    with pytest.raises(KeyError), lock.turn():
        raise KeyError
    other = StepLock(children.path)
    with other.turn(), pytest.raises(RuntimeError, match="already"):
        other.acquire()
    with lock.turn():
        pass


def test_closing_while_holding_passes_the_turn_on(children: Children) -> None:
    first, second = StepLock(children.path), StepLock(children.path)
    first.acquire()
    got = threading.Event()
    thread = threading.Thread(target=lambda: (second.acquire(), got.set()))  # type: ignore[func-returns-value]
    thread.start()
    assert not got.wait(0.2)
    first.close()
    assert got.wait(0.5)
    thread.join()


@pytest.mark.parametrize("weight", [0, -1])
def test_a_weight_is_positive(children: Children, weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        StepLock(children.path, weight=weight)
