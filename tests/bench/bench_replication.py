"""What copies on another node cost a request in CPU time: on two nodes of this machine, with and without, in turns.

    python tests/bench/bench_replication.py [--requests 4] [--rounds 20] [--prompt 256] [--output 64]

A turn is so many requests with prompts that nobody has seen, one after the other, in a namespace with `kv_replicas: 2`
or in one with 1, and the wait until all is copied. What counts is the CPU time of all processes: router,
replicas, both pools, raylets. Each round has one turn of each kind, their order changes, and both are equally long in
time, because Ray and Serve use some without any request. Prints the difference as a share of what a request takes
without copies, with its 95 % bootstrap interval over the rounds; and the same for pools and raylets alone, which do
nothing else that varies: on a busy machine the replicas' computing varies by more than what copies cost.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from bench_tracing import interval
from two_nodes import MODEL, NodePlatform, two_nodes

from remora.platform.cli.processes import command_of, marked_processes

_MARK = "REMORA_BENCH"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: In which all is copied.
_SETTLE_S = 3.0


class CPUTime(NamedTuple):
    """Seconds: of every process of the platform without this one, and of pools and raylets among them."""

    all_s: float
    copying_s: float


def cpu_time(mark: str) -> CPUTime:
    """So far."""
    total = copying = 0
    for process in marked_processes(_MARK, mark):
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks = int(fields[11]) + int(fields[12])
        total += ticks
        command = command_of(process.pid)
        copying += ticks if command.startswith("ray::PoolActor") or "/raylet" in command.split(" ")[0] else 0
    return CPUTime(total / _TICKS_PER_S, copying / _TICKS_PER_S)


class Turns:
    """Turns of requests whose prompts are all different."""

    def __init__(self, nodes: NodePlatform, mark: str, options: argparse.Namespace) -> None:
        self._nodes, self._mark, self._options = nodes, mark, options
        self._number = 0

    def run(self, namespace: str, least_s: float = 0.0) -> tuple[CPUTime, float]:
        """CPU time of a request, and how long the turn took, at least `least_s`."""
        started_s, before = time.monotonic(), cpu_time(self._mark)
        for _ in range(self._options.requests):
            self._request(namespace)
        # To ask more often would count as the cost of copies.
        time.sleep(max(_SETTLE_S, started_s + least_s - time.monotonic()))
        self._nodes.eventually(lambda: not self._nodes.copies("twice")["lag_blocks"], 60, what="all is copied")
        after, count = cpu_time(self._mark), self._options.requests
        took = CPUTime(*((now - then) / count for now, then in zip(after, before, strict=True)))
        return took, time.monotonic() - started_s

    def _request(self, namespace: str) -> None:
        self._number += 1
        prompt = [5 + (self._number * 104_729 + index * 7919) % 40_000 for index in range(self._options.prompt)]
        body: dict[str, Any] = {"model": MODEL, "namespace": namespace, "prompt": prompt, "temperature": 0}
        self._nodes.post("/v1/completions", {**body, "max_tokens": self._options.output, "ignore_eos": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4, help="a turn")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    options = parser.parse_args()
    mark = os.environ[_MARK] = secrets.token_hex(8)
    plain_s: list[float] = []
    added_s: list[float] = []
    added_to_copying_s: list[float] = []
    with two_nodes() as nodes:
        turns = Turns(nodes, mark, options)
        least_s = max(turns.run(namespace)[1] for namespace in ("twice", "once"))
        for round_no in range(options.rounds):
            order = ("twice", "once") if round_no % 2 else ("once", "twice")
            took = {namespace: turns.run(namespace, least_s)[0] for namespace in order}
            plain_s.append(took["once"].all_s)
            added_s.append(took["twice"].all_s - took["once"].all_s)
            added_to_copying_s.append(took["twice"].copying_s - took["once"].copying_s)
        copied = nodes.copies("twice")
    request_s = statistics.fmean(plain_s)
    print(f"{options.prompt} tokens in, {options.output} out: {request_s * 1e3:.0f} ms of CPU a request without copies")
    for what, added in (("copies add", added_s), ("to pools and raylets alone", added_to_copying_s)):
        mean_s, (low_s, high_s) = statistics.fmean(added), interval(added)
        print(
            f"{what} {mean_s * 1e3:.1f} ms ({low_s * 1e3:.1f} to {high_s * 1e3:.1f}): "
            f"{100 * mean_s / request_s:.2f} % ({100 * low_s / request_s:.2f} to {100 * high_s / request_s:.2f})"
        )
    print(f"{copied['copied_blocks']:.0f} blocks, {copied['copied_bytes'] / 1e6:.0f} MB were copied")


if __name__ == "__main__":
    main()
