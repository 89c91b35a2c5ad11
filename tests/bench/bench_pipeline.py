"""Pipelines of two stages, one core each, against the same model unsplit on both cores.

    python tests/bench/bench_pipeline.py [--shape 1b] [--weights bf16] [--only hops,prefill,decode,shared]

Random weights of a Llama shape; nothing is downloaded. Stages are processes that are pinned to a core each and have
their own arena. Prints a table: per-hop cost, prefill, decoding at batch 16 against its ceiling, two models on one
group. Needs two free cores, and memory for the weights twice ("shared": for both models).

The ceiling of decoding: the two stages are never idle, and every micro-batch (half of the sequences) reads all weights
once more, so a step of 16 takes twice the longest stage's time for 8 rows; measured with both stages at work at once
and nothing passed between them.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
from remora.deployments.pipeline.base import SameTables, StepResult, Ticket
from remora.deployments.pipeline.message import Message, MicroTime
from remora.deployments.pipeline.pipeline_decoder import PipelineDecoder
from remora.deployments.pipeline.ring import Ring
from remora.deployments.pipeline.rings import create_rings, open_ring, remove_rings, result_room_bytes
from remora.deployments.pipeline.split import LayerCosts, balanced_split, measure_costs
from remora.deployments.pipeline.stage_loop import StageLoop
from remora.kernels.base import DecoderShape
from remora.kernels.batch import StepBatch


def gate_of(lock: Path | None) -> StepGate:
    return OpenGate() if lock is None else StepLock(lock)


def stage_process(
    pipe: Connection, shape: DecoderShape, split: tuple[int, ...], core: int, lock: Path | None, micro_tokens: int
) -> None:
    """The second stage's process: serves one connection after the other, and times itself between them."""
    os.sched_setaffinity(0, {core})
    stage, limits, gate = Stage.make(shape, split, 1, 1), make_limits(shape, micro_tokens), gate_of(lock)
    pipe.send(process_identity())
    while (order := pipe.recv())[0] != "end":
        if order[0] == "serve":
            _, paths, peer = order
            loop = StageLoop(
                decoder=stage.decoder,
                part=stage.part,
                memory=stage.memory,
                gate=gate,
                receiver=open_ring(paths[0], peer),
                sender=open_ring(paths[1], peer),
                batch=limits.make_batch(),
                may_write=lambda: True,
            )
            pipe.send("open")
            loop.run()
            pipe.send(loop.stats())
        elif order[0] == "time":
            pipe.send(time_stage(stage, shape, order[1], order[2]))


@contextmanager
def second_stage(
    shape: DecoderShape, split: tuple[int, ...], lock: Path | None = None, micro_tokens: int = 64
) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=stage_process, args=(theirs, shape, split, CORES[1], lock, micro_tokens))
    process.start()
    try:
        yield ours
    finally:
        ours.send(("end",))
        process.join()


@contextmanager
def connected(
    stage: Stage, pipe: Connection, peer: Any, shape: DecoderShape, lock: Path | None = None, micro_tokens: int = 64
) -> Iterator[PipelineDecoder]:
    """Stage 0 here, stage 1 behind the pipe."""
    limits = make_limits(shape, micro_tokens)
    paths = create_rings(Path("/dev/shm"), "remora-bench-", limits)
    try:
        pipe.send(("serve", paths, process_identity()))
        sender, receiver = open_ring(paths[0], peer), open_ring(paths[1], peer)
        assert pipe.recv() == "open"
    finally:
        remove_rings(paths)
    decoder = PipelineDecoder(
        stage.decoder,
        stage.memory.geometry,
        limits=limits,
        gate=gate_of(lock),
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


def run_steps(decoder: PipelineDecoder, memory: Memory, batches: Iterator[StepBatch]) -> Iterator[StepResult]:
    """Two steps in flight, as an engine keeps them."""
    tickets: list[Ticket] = []
    for batch in batches:
        if len(tickets) == decoder.max_in_flight:
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


def bench_hops() -> None:
    """Seconds from one process to the other and back, halved, with the message written and read each time."""
    context = multiprocessing.get_context("spawn")
    print("hop through shared memory, one way, median of 300 (hidden states written and copied out):")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="remora-bench-") as folder:
        for hidden_size in (576, 2048):
            for num_tokens in (16, 512):
                there, back = (
                    Path(folder, f"there-{hidden_size}-{num_tokens}"),
                    Path(folder, f"back-{hidden_size}-{num_tokens}"),
                )
                for path in (there, back):
                    Ring.create(path, max_message_bytes=num_tokens * hidden_size * 4 + 65536, num_messages=2)
                ours, theirs = context.Pipe()
                echo = context.Process(target=echo_process, args=(theirs, there, back, process_identity(), CORES[1]))
                echo.start()
                peer = ours.recv()
                out, home = open_ring(there, peer), open_ring(back, peer)
                message = Message(
                    num_tokens=num_tokens,
                    times_K7=np.array([MicroTime()]),
                    values=np.ones((num_tokens, hidden_size), np.float32),
                )
                times_s = []
                for _ in range(300):
                    started_s = time.perf_counter()
                    pass_on(out, message)
                    Message.read(home.peek(time.monotonic() + 10)).values.copy()
                    home.release()
                    times_s.append((time.perf_counter() - started_s) / 2)
                out.close()
                echo.join()
                print(f"  {num_tokens:4d} tokens of {hidden_size:4d}: {median_s(times_s) * 1e6:8.1f} µs")


def pass_on(ring: Ring, message: Message) -> None:
    message.write_into(ring.reserve(message.num_bytes(), time.monotonic() + 10))
    ring.commit()


def echo_process(pipe: Connection, there: Path, back: Path, peer: Any, core: int) -> None:
    from remora.platform.base.errors import StageLost

    os.sched_setaffinity(0, {core})
    incoming, outgoing = open_ring(there, peer), open_ring(back, peer)
    pipe.send(process_identity())
    while True:
        try:
            message = Message.read(incoming.peek(math.inf))
        except StageLost:
            return
        message.values = message.values.copy()
        pass_on(outgoing, message)
        incoming.release()


def bench_alone(shape: DecoderShape, only: set[str], repeats: int, micro_tokens: int) -> None:
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
            with connected(stage, pipe, peer, shape, micro_tokens=micro_tokens) as decoder:
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
            with connected(stage, pipe, peer, shape) as decoder:
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


def model_process(pipe: Connection, shape: DecoderShape, split: tuple[int, ...], locks: list[Path]) -> None:
    """One of several models on the group: its stage 0, with a process for its stage 1."""
    os.sched_setaffinity(0, {CORES[0]})
    with second_stage(shape, split, locks[1]) as second:
        stage, peer = Stage.make(shape, split, 0, 1), second.recv()
        with connected(stage, second, peer, shape, locks[0]) as decoder:
            pipe.send("ready")
            while (order := pipe.recv()) != "end":
                _, until_s = order
                num_tokens = 0
                while time.time() < until_s:
                    # One sequence group, as an engine without lanes has: alone it leaves every other stage idle.
                    decoder.forward(decode_batch(range(BATCH), CONTEXT), stage.memory)
                    num_tokens += BATCH
                pipe.send(num_tokens)


def bench_shared(shape: DecoderShape, seconds: float) -> None:
    """Two models of two stages each: alone, one after the other, and both at once."""
    split = find_split(shape)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="remora-bench-") as folder:
        locks = [Path(folder, f"lock-{core}") for core in range(2)]
        pipes, processes = [], []
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=model_process, args=(theirs, shape, split, locks))
            process.start()
            assert ours.recv() == "ready"
            pipes.append(ours)
            processes.append(process)

        def rate(which: list[int]) -> float:
            until_s = time.time() + seconds
            for index in which:
                pipes[index].send(("decode", until_s))
            return sum(pipes[index].recv() for index in which) / seconds

        alone, both = [rate([0]), rate([1])], rate([0, 1])
        print(f"two models of two stages {split} on one group, batch {BATCH} each, one step in flight each:")
        print(f"  each alone            {alone[0]:7.1f} and {alone[1]:.1f} tokens/s")
        print(f"  taking turns          {sum(alone) / 2:7.1f} tokens/s of both together (half of the time each)")
        print(f"  interleaved           {both:7.1f} tokens/s of both together, {2 * both / sum(alone):.2f} x")
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
    parser.add_argument("--only", default="hops,prefill,decode,shared")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--micro-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    only, shape = set(options.only.split(",")), make_shape(options.shape, options.weights)
    print(f"{options.shape}, {options.weights} weights, cores {CORES}, load {os.getloadavg()[0]:.1f}")
    if "hops" in only:
        os.sched_setaffinity(0, {CORES[0]})
        bench_hops()
    if only & {"prefill", "decode"}:
        bench_alone(shape, only, options.repeats, options.micro_tokens)
    if "shared" in only:
        bench_shared(shape, options.seconds)


if __name__ == "__main__":
    main()
