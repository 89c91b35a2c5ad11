"""Pipelines: one model over several devices. The interface between computing in stages and everything around it.

    replica process (stage 0)                      stage worker 1 .. K-1, one process each on its own device
    engine ─ submit(batch) ─► stage 0 ── hidden states ─► stage 1 ── hidden states ─► ... last stage
           ◄─ collect(ticket) ◄──────────────── logits, faults, times ◄─────────────────────┘

The engine's block tables hold logical ids: those of stage 0's pool. The other stages have blocks of their own, whose
numbers `StageTables` knows; they travel with each micro-batch, so that a stage worker keeps no tables.

How a pipeline is put together, by the replica:

    split      stage_split(model, threads of each stage) (stage_split.py)  by hand, or by measured time
    stage 0    load_model(..., part=StagePart(split=split, stage=0))              LoadedModel of its layers
    stage i    StageWorker(config, model name, StagePart(split=split, stage=i), device) (stage_worker.py)
               load() -> StageCard ─► a lease for card.process on the stage's pool ─► attach(StageLease)
    then       connect_stages(stage 0's model, workers, cards, ...) (connect.py) makes the channels, starts the workers'
               loops and gives the PipelineDecoder; the replica's model gets this decoder, its engine an OpenGate
    a stage    that is gone: StageLost from every call; `close()`, a new worker, `connect_stages` again

Shapes: T tokens of the step, S sequences, B table columns, R rows with logits, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, NewType, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from remora.kernels.base import Decoder, KVMemory
from remora.kernels.batch import StepBatch
from remora.namespaces.commands import ProcessIdentity
from remora.namespaces.geometry import KVGeometry

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

#: One step that is in the pipeline, from `submit` to `collect`.
Ticket = NewType("Ticket", int)


class StageTables(Protocol):
    """Where the blocks of a logical block table lie in the pools of the later stages. Engine thread only."""

    def physical(self, stage: int, geometry: KVGeometry, logical_SB: Int32) -> Int32:
        """Physical block ids of `stage` (1 .. K-1), of the shape of `logical_SB`.

        `geometry` is stage 0's, in the precision of the sequences; ids of both sides are in units of their own
        geometry's block_bytes. Entries behind a sequence's context are not read, whatever they are on either side.
        Raises IntegrityError for another logical block that the stage does not hold.
        """
        ...


class SameTables:
    """Equal numbers in all stages: for pools that are filled in step, in tests and benches."""

    def physical(self, stage: int, geometry: KVGeometry, logical_SB: Int32) -> Int32:
        return logical_SB


class StageTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage did for one step."""

    stage: int
    num_micro_batches: int
    #: From the first micro-batch's arrival to the last one's departure. Wall clock, for spans.
    start_unix_ns: int
    end_unix_ns: int
    compute_s: float
    #: Waiting for the device's step lock.
    turn_wait_s: float
    #: Waiting for a micro-batch of the step while the stage before was at work on it: the bubble.
    bubble_s: float
    #: From the end of computing in the stage before to having the hidden states here, summed over micro-batches; 0 in
    #: stage 0.
    hop_s: float
    hop_bytes: int


class StepResult(NamedTuple):
    #: As the rows of the batch ask. Valid until max_in_flight further steps were submitted.
    logits_RV: Float32
    #: 1 where a stage could not hold K or V of the sequence (StepBatch.not_finite_S).
    not_finite_S: NDArray[np.uint8]
    times: tuple[StageTime, ...]


class PipelineRunner(Decoder, Protocol):
    """A decoder over several stages (pipeline_decoder.py: PipelineDecoder). One thread only, the engine's.

    `forward` is submit and collect at once. Takes the step lock by itself, for each micro-batch: do not hold it around
    a call. Steps complete in the order in which they were submitted, and each stage computes them in that order: a
    step may be submitted that reads KV of one that is still in the pipeline (the next chunk of a prompt), but the
    tokens of a sequence's decode step must be known.
    """

    @property
    def num_stages(self) -> int: ...

    @property
    def max_in_flight(self) -> int:
        """Steps that may be between submit and collect."""
        ...

    @property
    def num_in_flight(self) -> int: ...

    def submit(self, batch: StepBatch, memory: KVMemory) -> Ticket:
        """Computes the batch's micro-batches in stage 0, one after the other, and passes each on at once.

        `batch` may be filled anew when this returns. Raises KernelError, with nothing sent, for what `forward` of a
        decoder refuses, or when max_in_flight steps are under way; StageLost when a stage is gone. What goes wrong
        behind the first micro-batch is raised by `collect`.
        """
        ...

    def is_done(self, ticket: Ticket) -> bool:
        """Whether `collect` would not wait."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for the step, which must be the oldest. Raises KernelError when a stage failed to compute it (others
        that were submitted behind it go on); StageLost when a stage is gone or silent for the deadline, and then for
        every ticket."""
        ...

    def abandon(self) -> None:
        """Forgets all steps in flight, without waiting for stages that are gone. Living stages may still compute them:
        their blocks may be given up only after `drain`, or when the stage's process is gone."""
        ...

    def close(self) -> None:
        """Ends the stages' loops; every call raises StageLost from now on."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Waits until no stage computes anything any more; whether that was so in time."""
        ...


class StageCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage worker says of itself when its layers are loaded."""

    stage: int
    first_layer: int
    #: Of this stage's layers only: what its lease on its pool has.
    geometry: KVGeometry
    fingerprint: bytes
    #: With what its steps take of the device, where that is set aside.
    weights_bytes: int
    decoder: str
    #: Whoever takes a lease for the stage names this process: it is the one that writes.
    process: ProcessIdentity
    node_id: str


class StageLease(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's way to the memory of its pool; of cache_actors' PoolBinding and Attached."""

    arena_path: str
    #: Of a GPU's arena.
    ipc_handle: bytes = b""
    step_lock_path: str
    lease_slot: int
    generation: int
    incarnation: int
    #: Share of the device's time.
    weight: float = 1.0


#: "shared_memory": a ring in /dev/shm, on one node. "tcp": a connection between two nodes.
TransportKind = Literal["shared_memory", "tcp"]


class StageStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a stage since its start, for metrics."""

    stage: int
    num_micro_batches: int
    num_tokens: int
    compute_s: float
    turn_wait_s: float
    bubble_s: float
    hop_s: float
    hop_bytes: int
