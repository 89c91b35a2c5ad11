"""What a hop between two stages costs: a ring in shared memory, a TCP connection, Ray's object store.

    python tests/bench/bench_hops.py [--only ring,tcp,ray] [--hidden 576,2048] [--tokens 16,64,512]

Seconds from one process to the other and back, halved, with the message written and the hidden states copied out each
time. Both processes are on this machine, pinned to a core each: of a network there is nothing in the figures. For Ray's
object store they are actors on two nodes, two raylets on loopback, and each message is an argument of a call, which is
copied from one node's store to the other's.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster" / "nodes"))

from extra_nodes import ExtraNodes

from remora.cache_actors.process_watch import process_identity
from remora.deployments.pipeline.base import TransportKind
from remora.deployments.pipeline.channel import HopSender
from remora.deployments.pipeline.hops import HopPlace, open_receiver, open_sender
from remora.deployments.pipeline.message import Message, MicroTime
from remora.deployments.pipeline.pipeline_decoder import PipelineLimits
from remora.platform.base.errors import StageLost

_NUM_TIMES = 300
_PLACE = HopPlace(Path("/dev/shm"), "remora-bench-", "127.0.0.1")
_FIRST_CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
CORES = [int(core) for core in os.environ.setdefault("REMORA_BENCH_CORES", _FIRST_CORES).split(",")]


def limits_of(num_tokens: int, hidden_size: int) -> PipelineLimits:
    """Of three stages: both directions then carry hidden states."""
    return PipelineLimits(
        num_stages=3,
        hidden_size=hidden_size,
        vocab_size=1,
        max_blocks=8,
        max_num_seqs=num_tokens,
        max_step_tokens=num_tokens,
        max_micro_tokens=num_tokens,
    )


def pass_on(sender: HopSender, message: Message) -> None:
    message.write_into(sender.reserve(message.num_bytes(), time.monotonic() + 10))
    sender.commit()


def hidden_states(num_tokens: int, hidden_size: int) -> Message:
    return Message(
        num_tokens=num_tokens,
        times_K7=np.array([MicroTime()]),
        values=np.ones((num_tokens, hidden_size), np.float32),
    )


def echo_process(pipe: Connection, kind: TransportKind, limits: PipelineLimits, peer: Any, core: int) -> None:
    os.sched_setaffinity(0, {core})
    incoming, address = open_receiver(kind, limits, from_stage=0, peer=peer, place=_PLACE)
    pipe.send((address, process_identity()))
    outgoing = open_sender(pipe.recv())
    with contextlib.suppress(StageLost):
        while True:
            message = Message.read(incoming.peek(time.monotonic() + 60))
            message.values = message.values.copy()
            pass_on(outgoing, message)
            incoming.release()


def time_hop(kind: TransportKind, num_tokens: int, hidden_size: int) -> list[float]:
    limits, message = limits_of(num_tokens, hidden_size), hidden_states(num_tokens, hidden_size)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    echo = context.Process(target=echo_process, args=(theirs, kind, limits, process_identity(), CORES[1]))
    echo.start()
    address, peer = ours.recv()
    home, own_address = open_receiver(kind, limits, from_stage=1, peer=peer, place=_PLACE)
    ours.send(own_address)
    out = open_sender(address)
    times_s = []
    for _ in range(_NUM_TIMES):
        started_s = time.perf_counter()
        pass_on(out, message)
        Message.read(home.peek(time.monotonic() + 10)).values.copy()
        home.release()
        times_s.append((time.perf_counter() - started_s) / 2)
    out.close()
    home.close()
    echo.join()
    return times_s


class Echo:
    """An actor of another node."""

    def __init__(self, core: int) -> None:
        os.sched_setaffinity(0, {core})

    def pass_back(self, data: np.ndarray[Any, Any]) -> list[Any]:
        import ray

        message = Message.read(data)
        answer = np.empty(message.num_bytes(), np.uint8)
        message.write_into(answer)
        return [ray.put(answer)]


class Starter:
    """Of the first node."""

    def __init__(self, core: int) -> None:
        os.sched_setaffinity(0, {core})

    def times(self, echo: Any, num_tokens: int, hidden_size: int) -> list[float]:
        import ray

        message, times_s = hidden_states(num_tokens, hidden_size), []
        for _ in range(_NUM_TIMES):
            started_s = time.perf_counter()
            data = np.empty(message.num_bytes(), np.uint8)
            message.write_into(data)
            (answer,) = ray.get(echo.pass_back.remote(ray.put(data)))
            Message.read(ray.get(answer)).values.copy()
            times_s.append((time.perf_counter() - started_s) / 2)
        return times_s


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """An actor on each of two raylets of this machine."""
    from remora.platform.base.local_ray import new_temp_dir, start_local_ray, stop_local_ray

    folder = new_temp_dir()
    start_local_ray(folder, namespace="bench", num_cpus=4, object_store_bytes=256 * 1024 * 1024)
    import ray

    nodes = ExtraNodes(folder)
    try:
        nodes.add(other_node=1)
        own = {f"node:{ray.util.get_node_ip_address()}": 0.0}
        starter = ray.remote(Starter).options(num_cpus=1, resources=own).remote(CORES[0])
        echo = ray.remote(Echo).options(num_cpus=1, resources={"other_node": 1}).remote(CORES[1])
        yield starter, echo
    finally:
        nodes.close()
        stop_local_ray(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="ring,tcp,ray")
    parser.add_argument("--hidden", default="576,2048")
    parser.add_argument("--tokens", default="16,64,512")
    options = parser.parse_args()
    only = options.only.split(",")
    sizes = [(int(tokens), int(hidden)) for hidden in options.hidden.split(",") for tokens in options.tokens.split(",")]
    print(f"one hop, median of {_NUM_TIMES} (and 90th percentile), µs; cores {CORES}, load {os.getloadavg()[0]:.1f}")
    os.sched_setaffinity(0, {CORES[0]})
    kinds: list[tuple[str, TransportKind]] = [("ring", "shared_memory"), ("tcp", "tcp")]
    for name, kind in kinds:
        if name in only:
            for num_tokens, hidden_size in sizes:
                print_row(name, num_tokens, hidden_size, time_hop(kind, num_tokens, hidden_size))
    if "ray" in only:
        os.sched_setaffinity(0, set(CORES))
        import ray

        with two_nodes() as (starter, echo):
            for num_tokens, hidden_size in sizes:
                times_s = ray.get(starter.times.remote(echo, num_tokens, hidden_size))
                print_row("ray", num_tokens, hidden_size, times_s)


def print_row(name: str, num_tokens: int, hidden_size: int, times_s: list[float]) -> None:
    median_us = statistics.median(times_s) * 1e6
    slow_us = statistics.quantiles(times_s, n=10)[-1] * 1e6
    print(f"  {name:5s} {num_tokens:4d} tokens of {hidden_size:4d}: {median_us:8.0f} ({slow_us:.0f})")


if __name__ == "__main__":
    main()
