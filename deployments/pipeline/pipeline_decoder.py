"""A decoder over several stages, of which this process computes the first (base.PipelineRunner).

Shapes: T tokens of the step, S sequences, B table columns, R rows with logits, V vocabulary, K stages.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.port import StepGate
from remora.deployments.pipeline.base import Float32, Int32, StageStats, StageTables, StageTime, StepResult, Ticket
from remora.deployments.pipeline.channel import HopReceiver, HopSender
from remora.deployments.pipeline.message import Kind, Message, MicroTime, result_bytes
from remora.deployments.pipeline.micro_batches import RowRange, cut_step, fill_micro_batch
from remora.deployments.pipeline.ring import message_room
from remora.deployments.pipeline.stage_counters import StageCounters, stage_time
from remora.kernels.base import KVMemory, StageDecoder, check_decoder_health
from remora.kernels.batch import StepBatch
from remora.kernels.mover import Mover, mover_of
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import IntegrityError, KernelError, StageLost, named_error


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLimits:
    """Sizes that the channels are made for, and how steps are cut."""

    num_stages: int
    hidden_size: int
    vocab_size: int
    #: Of one sequence: columns of block tables.
    max_blocks: int
    max_num_seqs: int
    max_step_tokens: int
    #: Tokens of a micro-batch at most: a prompt's chunks follow each other through the stages. Native kernels take the
    #: same time a token from 32 tokens on; the shorter the chunks, the sooner later stages have work.
    max_micro_tokens: int = 64
    #: Micro-batches that a step of decoding sequences is cut into at least; 1: overlap comes from steps in flight.
    num_decode_groups: int = 1
    max_in_flight: int = 2
    #: A stage that is silent for so long is lost.
    deadline_s: float = 60.0

    def make_batch(self) -> StepBatch:
        """Room for the largest micro-batch."""
        num_tokens = min(self.max_micro_tokens, self.max_step_tokens)
        return StepBatch(
            max_tokens=num_tokens, max_sequences=min(self.max_num_seqs, num_tokens), max_blocks=self.max_blocks
        )


class _InFlight(NamedTuple):
    """A message that is under way."""

    ticket: int
    #: What its result may take in the channel back.
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Step:
    ticket: Ticket
    micros: list[RowRange]
    logits_RV: Float32
    not_finite_S: NDArray[np.uint8]
    num_sent: int = 0
    num_done: int = 0
    fault: Exception | None = None
    times: list[list[MicroTime]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_sent

    def take(self, message: Message) -> None:
        """A micro-batch has come out of the last stage."""
        rows = self.micros[message.micro]
        self.num_done += 1
        for stage, micro in enumerate(message.times_K7):
            self.times[stage].append(MicroTime(*micro.tolist()))
        if message.fault:
            name, _, sentence = message.fault.partition(": ")
            self.fault = self.fault or named_error(name, sentence)
            return
        marks = self.not_finite_S[rows.first_sequence : rows.end_sequence]
        np.maximum(marks, message.not_finite_S, out=marks)
        self.logits_RV[rows.first_logit : rows.end_logit] = message.values

    def stage_times(self) -> tuple[StageTime, ...]:
        return tuple(stage_time(stage, micros) for stage, micros in enumerate(self.times) if micros)


class PipelineDecoder:
    """base.PipelineRunner."""

    def __init__(
        self,
        decoder: StageDecoder,
        geometry: KVGeometry,
        *,
        limits: PipelineLimits,
        gate: StepGate,
        tables: StageTables,
        sender: HopSender,
        receiver: HopReceiver,
        result_room_bytes: int,
    ) -> None:
        """`decoder` has the layers of stage 0, whose KV has this geometry. `result_room_bytes`: results that the last
        stage can send without waiting for this process, so that no two stages ever wait for each other."""
        self._decoder = decoder
        self._geometry = geometry
        self._limits = limits
        self._gate = gate
        self._tables = tables
        self._sender = sender
        self._receiver = receiver
        self._room_bytes = result_room_bytes
        self._micro = limits.make_batch()
        self._steps: deque[_Step] = deque()
        self._under_way: deque[_InFlight] = deque()
        self._under_way_bytes = 0
        self._next_ticket = 1
        self._num_drains = 0
        self._lost = ""
        #: One for each step in flight, and the last one's that the caller may still read.
        self._buffers: list[Float32] = [np.empty(0, np.float32)] * (limits.max_in_flight + 1)
        self._counters = StageCounters(0)

    # ---- Decoder

    @property
    def batch_invariant(self) -> bool:
        return self._decoder.batch_invariant

    @property
    def name(self) -> str:
        return f"{self._decoder.name}, {self._limits.num_stages} stages"

    def check_geometry(self, geometry: KVGeometry) -> None:
        """Raises KernelError for any other than its own: all stages hold KV in one precision."""
        if geometry != self._geometry:
            raise KernelError(f"a model in stages has KV of one precision, {'/'.join(self._geometry.kv_precision)}")

    def mover(self, memory: KVMemory, rope_inv_freq: NDArray[np.float32] | None) -> Mover:
        """Of this process's memory, which is stage 0's: kernels.mover.mover_of."""
        return mover_of(self._decoder, memory, rope_inv_freq)

    def check_health(self) -> None:
        """Of stage 0: kernels.base.check_decoder_health."""
        check_decoder_health(self._decoder)

    def forward(self, batch: StepBatch, memory: KVMemory) -> Float32:
        """One step through all stages. As Decoder.forward; raises StageLost, too."""
        if self._steps:
            raise KernelError("forward runs alone: other steps are in flight")
        result = self.collect(self.submit(batch, memory))
        batch.not_finite_S[: batch.num_sequences] = result.not_finite_S
        return result.logits_RV

    # ---- PipelineRunner

    @property
    def num_stages(self) -> int:
        return self._limits.num_stages

    @property
    def max_in_flight(self) -> int:
        return self._limits.max_in_flight

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    def submit(self, batch: StepBatch, memory: KVMemory) -> Ticket:
        """Computes stage 0 of the step and passes it on; see base.PipelineRunner."""
        self._check(batch, memory)
        limits = self._limits
        micros = cut_step(batch, max_tokens=limits.max_micro_tokens, num_groups=self._num_groups(batch))
        widest = max(rows.end_logit - rows.first_logit for rows in micros)
        if widest > limits.max_num_seqs:
            raise KernelError(f"{widest} rows of logits in a micro-batch; at most {limits.max_num_seqs}")
        tables_KSB = self._physical_tables(batch)
        step = _Step(
            ticket=Ticket(self._next_ticket),
            micros=micros,
            logits_RV=self._logits(batch.num_logit_rows),
            not_finite_S=np.zeros(batch.num_sequences, np.uint8),
            times=[[] for _ in range(limits.num_stages)],
        )
        self._next_ticket += 1
        self._steps.append(step)
        for index, rows in enumerate(micros):
            try:
                self._compute_and_send(step, index, rows, batch, memory, tables_KSB)
            except StageLost:
                raise
            except Exception as error:  # a back-end's own errors as well as KernelError
                if index == 0:
                    self._steps.pop()
                    raise
                step.fault = error
                break
        return step.ticket

    def is_done(self, ticket: Ticket) -> bool:
        """Takes in what has come, and says whether that step is whole."""
        while self._under_way and self._receiver.has_message():
            self._receive()
        return any(step.ticket == ticket and step.is_done for step in self._steps)

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits for the oldest step; see base.PipelineRunner."""
        if not self._steps or self._steps[0].ticket != ticket:
            raise KernelError(f"step {ticket} is not the oldest in flight")
        step = self._steps[0]
        asked_s = time.perf_counter()
        while not step.is_done:
            self._receive()
        waited_s = time.perf_counter() - asked_s
        self._counters.add_bubble(waited_s)
        self._steps.popleft()
        if step.fault is not None:
            raise step.fault
        step.times[0][-1] = step.times[0][-1]._replace(bubble_s=waited_s)
        return StepResult(step.logits_RV, step.not_finite_S, step.stage_times())

    def abandon(self) -> None:
        """Forgets all steps; what still comes of them is dropped."""
        self._steps.clear()

    def drain(self, timeout_s: float) -> bool:
        """Whether all stages have nothing to do any more, within this time. Forgets all steps."""
        self.abandon()
        deadline_s = time.monotonic() + timeout_s
        self._num_drains += 1
        try:
            self._send(Message(kind=Kind.DRAIN, ticket=self._num_drains), 0, 0)
            while self._under_way:
                self._receive(deadline_s)
        except StageLost:
            return False
        return True

    def stage_stats(self) -> StageStats:
        """Of stage 0. Its bubble is the time in which `collect` waited."""
        return self._counters.stats()

    def close(self) -> None:
        """Ends the stages' loops; every call raises StageLost from now on."""
        self._lost = self._lost or "the pipeline is closed"
        self._sender.close()
        self._receiver.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError when what is counted as under way contradicts the steps."""
        waiting = sum(step.num_sent - step.num_done for step in self._steps)
        if waiting > len(self._under_way):
            raise IntegrityError(f"steps wait for {waiting} micro-batches, {len(self._under_way)} are under way")
        num_bytes = sum(message.num_bytes for message in self._under_way)
        if num_bytes != self._under_way_bytes:
            raise IntegrityError(f"results of {num_bytes} bytes are under way, {self._under_way_bytes} are counted")

    # ---- inside

    def _check(self, batch: StepBatch, memory: KVMemory) -> None:
        if self._lost:
            raise StageLost(self._lost)
        if len(self._steps) >= self._limits.max_in_flight:
            raise KernelError(f"{len(self._steps)} steps are in flight; at most {self._limits.max_in_flight}")
        self.check_geometry(memory.geometry)
        if batch.num_tokens < 1:
            raise KernelError("a step without tokens")

    def _num_groups(self, batch: StepBatch) -> int:
        decodes_only = batch.num_sequences == batch.num_tokens
        return self._limits.num_decode_groups if decodes_only else 1

    def _logits(self, num_rows: int) -> Float32:
        """Memory for the logits of the step that begins."""
        slot = self._next_ticket % len(self._buffers)
        count = num_rows * self._limits.vocab_size
        if len(self._buffers[slot]) < count:
            self._buffers[slot] = np.empty(count, np.float32)
        return self._buffers[slot][:count].reshape(num_rows, self._limits.vocab_size)

    def _num_columns(self, context_len_S: Int32) -> int:
        return -(-int(context_len_S.max()) // self._geometry.block_tokens)

    def _physical_tables(self, batch: StepBatch) -> Int32:
        """Of the stages behind this one, [K - 1][S][B]; 0 where the step does not read."""
        context_len_S = batch.context_len_S[: batch.num_sequences]
        num_columns = self._num_columns(context_len_S)
        if num_columns > batch.block_table_SB.shape[1]:
            raise KernelError(f"{int(context_len_S.max())} tokens need {num_columns} columns of the block table")
        logical_SB = batch.block_table_SB[: batch.num_sequences, :num_columns]
        num_read_S = -(-context_len_S // self._geometry.block_tokens)
        is_read_SB = np.arange(num_columns) < num_read_S[:, None]
        tables_KSB = np.zeros((self._limits.num_stages - 1, *logical_SB.shape), np.int32)
        for stage in range(1, self._limits.num_stages):
            physical_SB = self._tables.physical(stage, self._geometry, logical_SB)
            np.copyto(tables_KSB[stage - 1], physical_SB, where=is_read_SB)
        return tables_KSB

    def _compute_and_send(
        self, step: _Step, index: int, rows: RowRange, batch: StepBatch, memory: KVMemory, tables_KSB: Int32
    ) -> None:
        micro = self._micro
        num_columns = self._num_columns(batch.context_len_S[rows.first_sequence : rows.end_sequence])
        fill_micro_batch(micro, batch, rows, num_columns)
        num_sequences, num_logits = micro.num_sequences, micro.num_logit_rows
        asked_s = time.perf_counter()
        with self._gate.turn():
            started_s, start_unix_s = time.perf_counter(), time.time()
            hidden_TH = self._decoder.forward_stage(micro, memory, None)
            compute_s = time.perf_counter() - started_s
        own = MicroTime(
            start_unix_s=start_unix_s,
            end_unix_s=start_unix_s + compute_s,
            compute_s=compute_s,
            turn_wait_s=started_s - asked_s,
        )
        self._counters.add(own, micro.num_tokens)
        self._send(
            Message(
                ticket=step.ticket,
                micro=index,
                num_tokens=micro.num_tokens,
                times_K7=np.array([own]),
                tables_KSB=np.ascontiguousarray(tables_KSB[:, rows.first_sequence : rows.end_sequence, :num_columns]),
                query_start_S=micro.query_start_S[: num_sequences + 1],
                context_len_S=micro.context_len_S[:num_sequences],
                logit_rows_R=micro.logit_rows_R[:num_logits],
                not_finite_S=micro.not_finite_S[:num_sequences],
                values=hidden_TH,
            ),
            num_sequences,
            num_logits,
        )
        step.num_sent += 1

    def _send(self, message: Message, num_sequences: int, num_logits: int) -> None:
        """Waits until the result is certain to find room, so that the last stage never waits for this one."""
        room_bytes = message_room(
            result_bytes(
                num_stages=self.num_stages,
                num_sequences=num_sequences,
                num_logits=num_logits,
                vocab_size=self._limits.vocab_size,
            )
        )
        while self._under_way and self._under_way_bytes + room_bytes > self._room_bytes:
            self._receive()
        try:
            buffer = self._sender.reserve(message.num_bytes(), time.monotonic() + self._limits.deadline_s)
            message.write_into(buffer)
            self._sender.commit()
        except StageLost as lost:
            self._lost = str(lost)
            raise
        self._under_way.append(_InFlight(message.ticket, room_bytes))
        self._under_way_bytes += room_bytes

    def _receive(self, deadline_s: float | None = None) -> None:
        """Waits for the next micro-batch that comes out of the last stage."""
        if self._lost:
            raise StageLost(self._lost)
        if deadline_s is None:
            deadline_s = time.monotonic() + self._limits.deadline_s
        try:
            buffer = self._receiver.peek(deadline_s)
        except StageLost as lost:
            self._lost = str(lost)
            raise
        message = Message.read(buffer)
        self._under_way_bytes -= self._under_way.popleft().num_bytes
        if message.kind == Kind.WORK:
            # Unknown tickets are of abandoned steps.
            for step in self._steps:
                if step.ticket == message.ticket:
                    step.take(message)
        self._receiver.release()
