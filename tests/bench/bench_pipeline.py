"""Pipelines of two stages, one core each, against the same model unsplit on both cores.

    python tests/bench/bench_pipeline.py [--shape 1b] [--weights bf16] [--only prefill,decode,shared]

Random weights of a Llama shape; nothing is downloaded. Stages are processes that are pinned to a core each and have
their own arena. Prints a table: prefill, decoding at batch 16 against its ceiling, two models on one
group. Needs two free cores, and memory for the weights twice ("shared": for both models).

The ceiling of decoding: the two stages are never idle, and every micro-batch (half of the sequences) reads all weights
once more, so a step of 16 takes twice the longest stage's time for 8 rows; measured with both stages at work at once
and nothing passed between them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_native import SHAPES, Memory, make_shape
from random_stage import (
    BATCH,
    BLOCK_TOKENS,
    CONTEXT,
    MAX_BLOCKS,
    NUM_BLOCKS,
    PROMPT,
    STEP_TOKENS,
    Stage,
    make_limits,
)

from remora.cache_actors.port import OpenGate, StepGate
from remora.cache_actors.process_watch import process_identity
from remora.cache_actors.step_lock import StepLock
from remora.deployments.pipeline.base import SameTables, StepResult, Ticket, TransportKind
from remora.deployments.pipeline.hops import HopPlace, open_receiver, open_sender, result_room_bytes
from remora.deployments.pipeline.pipeline_decoder import PipelineDecoder
from remora.deployments.pipeline.split import LayerCosts, balanced_split, measure_costs
from remora.deployments.pipeline.stage_loop import StageLoop
from remora.kernels.base import DecoderShape
from remora.kernels.batch import StepBatch

PLACE = HopPlace(Path("/dev/shm"), "remora-bench-", "127.0.0.1")


def gate_of(lock: Path | None, weight: float = 1.0) -> StepGate:
    return OpenGate() if lock is None else StepLock(lock, weight=weight)


def stage_process(
    pipe: Connection,
    shape: DecoderShape,
    split: tuple[int, ...],
    core: int,
    lock: Path | None,
    micro_tokens: int,
    weight: float,
) -> None:
    """The second stage's process: serves one connection after the other, and times itself between them."""
    os.sched_setaffinity(0, {core})
    stage, limits, gate = Stage.make(shape, split, 1, 1), make_limits(shape, micro_tokens), gate_of(lock, weight)
    pipe.send(process_identity())
    while (order := pipe.recv())[0] != "end":
        if order[0] == "serve":
            _, kind, back, peer = order
            receiver, address = open_receiver(kind, limits, from_stage=0, peer=peer, place=PLACE)
            pipe.send(address)
            loop = StageLoop(
                decoder=stage.decoder,
                part=stage.part,
                memory=stage.memory,
                gate=gate,
                receiver=receiver,
                sender=open_sender(back),
                batch=limits.make_batch(),
                may_write=lambda: True,
            )
            loop.run()
            pipe.send(loop.stats())
        elif order[0] == "time":
            pipe.send(time_stage(stage, shape, order[1], order[2]))


@contextmanager
def second_stage(
    shape: DecoderShape,
    split: tuple[int, ...],
    lock: Path | None = None,
    micro_tokens: int = 64,
    weight: float = 1.0,
) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=stage_process, args=(theirs, shape, split, CORES[1], lock, micro_tokens, weight))
    process.start()
    try:
        yield ours
    finally:
        ours.send(("end",))
        process.join()


@contextmanager
def connected(
    stage: Stage,
    pipe: Connection,
    peer: Any,
    shape: DecoderShape,
    lock: Path | None = None,
    micro_tokens: int = 64,
    transport: TransportKind = "shared_memory",
    weight: float = 1.0,
) -> Iterator[PipelineDecoder]:
    """Stage 0 here, stage 1 behind the pipe."""
    limits = make_limits(shape, micro_tokens)
    receiver, back = open_receiver(transport, limits, from_stage=1, peer=peer, place=PLACE)
    pipe.send(("serve", transport, back, process_identity()))
    sender = open_sender(pipe.recv())
    decoder = PipelineDecoder(
        stage.decoder,
        stage.memory.geometry,
        limits=limits,
        gate=gate_of(lock, weight),
        tables=SameTables(),
        sender=sender,
        receiver=receiver,
        result_room_bytes=result_room_bytes(receiver, limits),
    )
    try:
        yield decoder
    finally:
        decoder.close()
        pipe.recv()


# ---- steps


def decode_batch(sequences: range, position: int) -> StepBatch:
    batch = StepBatch(max_tokens=STEP_TOKENS, max_sequences=BATCH, max_blocks=MAX_BLOCKS)
    each = NUM_BLOCKS // BATCH
    for sequence in sequences:
        blocks = [each * sequence + block for block in range(position // BLOCK_TOKENS + 1)]
        batch.add([sequence + 1], first_position=position, blocks=blocks)
    return batch


def prompt_batches() -> list[StepBatch]:
    """A prompt in steps of the engine's budget; logits of the last token."""
    batches = []
    for first in range(0, PROMPT, STEP_TOKENS):
        batch = StepBatch(max_tokens=STEP_TOKENS, max_sequences=BATCH, max_blocks=MAX_BLOCKS)
        tokens = np.arange(first, first + STEP_TOKENS, dtype=np.int32)
        last = first + STEP_TOKENS == PROMPT
        batch.add(tokens, first_position=first, blocks=list(range(MAX_BLOCKS)), logits="last" if last else "none")
        batches.append(batch)
    return batches


def run_steps(
    decoder: PipelineDecoder, memory: Memory, batches: Iterator[StepBatch], num_in_flight: int = 2
) -> Iterator[StepResult]:
    """So many steps in flight; an engine keeps two."""
    tickets: list[Ticket] = []
    for batch in batches:
        if len(tickets) == num_in_flight:
            yield decoder.collect(tickets.pop(0))
        tickets.append(decoder.submit(batch, memory))
    for ticket in tickets:
        yield decoder.collect(ticket)


def lanes(num_steps: int) -> Iterator[StepBatch]:
    """Decoding in two lanes of half the sequences each."""
    for step in range(num_steps):
        for lane in (range(BATCH // 2), range(BATCH // 2, BATCH)):
            yield decode_batch(lane, CONTEXT + step)


def median_s(times_s: list[float]) -> float:
    return statistics.median(times_s)


def time_stage(stage: Stage, shape: DecoderShape, num_rows: int, num_steps: int) -> float:
    """Median seconds of one stage's step of decoding rows; nothing is passed on."""
    batch = decode_batch(range(num_rows), CONTEXT)
    hidden = None if stage.part.is_first else np.zeros((num_rows, shape.hidden_size), np.float32)
    times_s = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        stage.decoder.forward_stage(batch, stage.memory, hidden)
        times_s.append(time.perf_counter() - started_s)
    return median_s(times_s)


# ---- measurements


def bench_alone(shape: DecoderShape, only: set[str], repeats: int, micro_tokens: int, transport: TransportKind) -> None:
    """Prefill and decoding of one model, unsplit on both cores and in two stages."""
    os.sched_setaffinity(0, set(CORES))
    unsplit: dict[str, list[float]] = {"prefill": [], "decode": []}
    whole = Stage.make(shape, (shape.num_layers,), 0, 2)
    for _ in range(repeats):
        started_s = time.perf_counter()
        for batch in prompt_batches():
            whole.decoder.forward(batch, whole.memory)
        unsplit["prefill"].append(time.perf_counter() - started_s)
        unsplit["decode"].append(time_stage(whole, shape, BATCH, 24))
    del whole
    split = find_split(shape)
    os.sched_setaffinity(0, {CORES[0]})
    with second_stage(shape, split, micro_tokens=micro_tokens) as pipe:
        stage, peer = Stage.make(shape, split, 0, 1), pipe.recv()
        if "prefill" in only:
            times_s, bubbles = [], []
            with connected(stage, pipe, peer, shape, micro_tokens=micro_tokens, transport=transport) as decoder:
                for _ in range(repeats):
                    started_s = time.perf_counter()
                    results = list(run_steps(decoder, stage.memory, iter(prompt_batches())))
                    times_s.append(time.perf_counter() - started_s)
                    bubbles.append(bubble_share(results))
            ours, theirs = median_s(times_s), median_s(unsplit["prefill"])
            print(f"prefill of {PROMPT} tokens, micro-batches of {micro_tokens}:")
            print_rate("unsplit, both cores", theirs, PROMPT)
            print_rate(f"two stages {split}", ours, PROMPT, f"{theirs / ours:.2f} x (bar 0.90)")
            print(f"  bubble share of stage 0 and 1: {bubbles[-1]}")
        if "decode" in only:
            ceilings_s = []
            for _ in range(repeats):
                pipe.send(("time", BATCH // 2, 24))
                first_s = time_stage(stage, shape, BATCH // 2, 24)
                ceilings_s.append(2 * max(first_s, pipe.recv()))
            ceiling_s = median_s(ceilings_s)
            times_s, num_steps = [], 24
            with connected(stage, pipe, peer, shape, transport=transport) as decoder:
                for _ in range(repeats):
                    started_s = time.perf_counter()
                    results = list(run_steps(decoder, stage.memory, lanes(num_steps)))
                    times_s.append((time.perf_counter() - started_s) / num_steps)
            ours, theirs = median_s(times_s), median_s(unsplit["decode"])
            print(f"decoding at batch {BATCH}, position {CONTEXT}, two steps of {BATCH // 2} in flight:")
            print_rate("unsplit, both cores", theirs, BATCH)
            print_rate("ceiling", ceiling_s, BATCH)
            print_rate(f"two stages {split}", ours, BATCH, f"{ceiling_s / ours * 100:.1f} % of the ceiling (bar 85)")
            print(f"  bubble share of stage 0 and 1: {bubble_share(results)}")


def print_rate(what: str, step_s: float, num_tokens: int, verdict: str = "") -> None:
    print(f"  {what:22s} {step_s * 1e3:9.1f} ms  {num_tokens / step_s:8.1f} tokens/s   {verdict}")


def bubble_share(results: list[StepResult]) -> str:
    shares = []
    for stage in range(2):
        times = [result.times[stage] for result in results]
        bubble_s, compute_s = sum(t.bubble_s for t in times), sum(t.compute_s for t in times)
        shares.append(f"{bubble_s / (bubble_s + compute_s) * 100:.1f} %")
    return ", ".join(shares)


def find_split(shape: DecoderShape) -> tuple[int, ...]:
    os.sched_setaffinity(0, {CORES[0]})
    costs: LayerCosts = measure_costs(shape, 1)
    split = balanced_split([costs, costs])
    rest = f"embedding {costs.embedding_s * 1e3:.1f} ms, head {costs.head_s * 1e3:.1f} ms"
    print(f"split {split}, by a layer's {costs.layer_s[0] * 1e3:.1f} ms a request, {rest}")
    return split


class Work(NamedTuple):
    num_tokens: int
    #: On the first device and on the second.
    compute_s: tuple[float, float]


def model_process(
    pipe: Connection, shape: DecoderShape, split: tuple[int, ...], locks: list[Path], weight: float
) -> None:
    """One of several models on the group: its stage 0, with a process for its stage 1."""
    os.sched_setaffinity(0, {CORES[0]})
    with second_stage(shape, split, locks[1], weight=weight) as second:
        stage, peer = Stage.make(shape, split, 0, 1), second.recv()
        with connected(stage, second, peer, shape, locks[0], weight=weight) as decoder:
            pipe.send("ready")
            while (order := pipe.recv()) != "end":
                until_s, num_lanes = order
                results = list(run_steps(decoder, stage.memory, decode_until(until_s, num_lanes), num_lanes))
                times = [sum(result.times[stage].compute_s for result in results) for stage in range(2)]
                pipe.send(Work(len(results) * BATCH // num_lanes, (times[0], times[1])))


def decode_until(until_s: float, num_lanes: int) -> Iterator[StepBatch]:
    """With one lane, a model alone leaves every other stage idle."""
    rows = BATCH // num_lanes
    while time.time() < until_s:
        for lane in range(num_lanes):
            yield decode_batch(range(lane * rows, (lane + 1) * rows), CONTEXT)


def bench_shared(shape: DecoderShape, seconds: float, weights: list[float]) -> None:
    """Two models of two stages each: alone, one after the other, and both at once; and what their weights do."""
    split = find_split(shape)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="remora-bench-") as folder:
        locks = [Path(folder, f"lock-{core}") for core in range(2)]
        pipes, processes = [], []
        for weight in weights:
            ours, theirs = context.Pipe()
            process = context.Process(target=model_process, args=(theirs, shape, split, locks, weight))
            process.start()
            assert ours.recv() == "ready"
            pipes.append(ours)
            processes.append(process)

        def work(which: list[int], num_lanes: int) -> list[Work]:
            until_s = time.time() + seconds
            for index in which:
                pipes[index].send((until_s, num_lanes))
            return [pipes[index].recv() for index in which]

        def rate(which: list[int]) -> float:
            return sum(each.num_tokens for each in work(which, 1)) / seconds

        alone, both = [rate([0]), rate([1])], rate([0, 1])
        print(f"two models of two stages {split} on one group, batch {BATCH} each, one step in flight each:")
        print(f"  each alone            {alone[0]:7.1f} and {alone[1]:.1f} tokens/s")
        print(f"  taking turns          {sum(alone) / 2:7.1f} tokens/s of both together (half of the time each)")
        print(f"  interleaved           {both:7.1f} tokens/s of both together, {2 * both / sum(alone):.2f} x")
        for num_lanes in (1, 2):
            first, second = work([0, 1], num_lanes)
            shares = [ours / (ours + theirs) for ours, theirs in zip(first.compute_s, second.compute_s, strict=True)]
            wanted = weights[0] / sum(weights)
            print(
                f"  {num_lanes} in flight each: the first has {shares[0]:.3f} and {shares[1]:.3f} of the devices' time"
            )
            print(f"      by weights of {weights} it would have {wanted:.3f}")
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join()


#: The two that the first process may use; its children, which begin on one of them, are told by the environment.
_FIRST_CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
CORES = [int(core) for core in os.environ.setdefault("REMORA_BENCH_CORES", _FIRST_CORES).split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], default="1b")
    parser.add_argument("--weights", choices=["fp32", "bf16", "int8", "int4"], default="bf16")
    parser.add_argument("--only", default="prefill,decode,shared")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model-weights", default="1,1", help="at the step locks, of the two that share a group")
    parser.add_argument("--transport", choices=["shared_memory", "tcp"], default="shared_memory", help="of alone")
    options = parser.parse_args()
    only, shape = set(options.only.split(",")), make_shape(options.shape, options.weights)
    print(f"{options.shape}, {options.weights} weights, cores {CORES}, load {os.getloadavg()[0]:.1f}")
    if only & {"prefill", "decode"}:
        bench_alone(shape, only, options.repeats, options.micro_tokens, options.transport)
    if "shared" in only:
        bench_shared(shape, options.seconds, [float(weight) for weight in options.model_weights.split(",")])


if __name__ == "__main__":
    main()
