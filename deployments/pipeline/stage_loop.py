"""What a stage behind the first does: receive a micro-batch, take the device's turn, compute, pass on.

Shapes: T tokens of the micro-batch, S sequences.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from remora.cache_actors.port import StepGate
from remora.deployments.pipeline.base import StageStats
from remora.deployments.pipeline.channel import HopReceiver, HopSender
from remora.deployments.pipeline.message import Kind, Message, MicroTime
from remora.deployments.pipeline.stage_counters import StageCounters
from remora.kernels.base import KVMemory, StageDecoder, check_decoder_health
from remora.kernels.batch import StepBatch
from remora.kernels.stages import StagePart
from remora.platform.base.errors import KernelError, RemoraError, StageLost

_log = logging.getLogger(__name__)


class StageLoop:
    """One thread calls `run`; another may `stop` it and read `stats`."""

    def __init__(
        self,
        *,
        decoder: StageDecoder,
        part: StagePart,
        memory: KVMemory,
        gate: StepGate,
        receiver: HopReceiver,
        sender: HopSender,
        batch: StepBatch,
        may_write: Callable[[], bool],
        deadline_s: float = 60.0,
    ) -> None:
        """`batch` holds the largest micro-batch. `may_write`: whether the lease on the memory still holds; asked after
        each micro-batch, before anything of it leaves (design §4.1). `deadline_s`: how long the next stage may take to
        make room."""
        self._decoder = decoder
        self._part = part
        self._memory = memory
        self._gate = gate
        self._receiver = receiver
        self._sender = sender
        self._batch = batch
        self._may_write = may_write
        self._deadline_s = deadline_s
        self._counters = StageCounters(part.stage)

    def run(self) -> str:
        """Works until the channel is closed or a neighbour is gone; returns which, as a sentence.

        Raises StageLost when the lease on the memory is lost, KernelError when the decoder can compute nothing more:
        the process must end.
        """
        try:
            while True:
                self._pass_on()
        except StageLost as lost:
            if not self._may_write():
                raise
            return str(lost)
        finally:
            self._receiver.close()
            self._sender.close()

    def stop(self) -> None:
        """Makes `run` return when it next waits."""
        self._receiver.close()

    def stats(self) -> StageStats:
        return self._counters.stats()

    def _pass_on(self) -> None:
        waits_since_s = time.time()
        buffer = self._receiver.peek(math.inf)
        received_s = time.time()
        message = Message.read(buffer)
        if message.kind == Kind.WORK and not message.fault:
            self._compute(message, waits_since_s, received_s)
        else:
            message.values = message.values[:0]
            message.tables_KSB = message.tables_KSB[1:]
            self._send(message)
        self._receiver.release()

    def _compute(self, message: Message, waits_since_s: float, received_s: float) -> None:
        hop_s = max(0.0, received_s - max(waits_since_s, message.sent_unix_s))
        # Waiting counts as a bubble from when the micro-batch was in the pipeline at all.
        began_unix_s = float(message.times_K7[0, 0])
        bubble_s = max(0.0, min(received_s, message.sent_unix_s) - max(waits_since_s, began_unix_s))
        hop_bytes, batch = float(message.values.nbytes), self._batch
        message.fill(batch)
        asked_s = time.perf_counter()
        with self._gate.turn():
            started_s = time.perf_counter()
            start_unix_s = time.time()
            try:
                values = self._decoder.forward_stage(batch, self._memory, message.values)
            except Exception as error:  # a back-end's own errors as well as KernelError
                check_decoder_health(self._decoder)
                _log.warning("stage %d cannot compute a micro-batch: %s", self._part.stage, error, exc_info=True)
                name = type(error if isinstance(error, RemoraError) else KernelError()).__name__
                message.fault = f"{name}: stage {self._part.stage}: {error}"
                values = message.values[:0]
            compute_s = time.perf_counter() - started_s
        if not self._may_write():
            raise StageLost(f"the lease of stage {self._part.stage} on its memory is lost")
        own = MicroTime(
            start_unix_s=start_unix_s,
            end_unix_s=start_unix_s + compute_s,
            compute_s=compute_s,
            turn_wait_s=started_s - asked_s,
            bubble_s=bubble_s,
            hop_s=hop_s,
            hop_bytes=hop_bytes,
        )
        self._counters.add(own, message.num_tokens)
        marks = batch.not_finite_S[: batch.num_sequences]
        self._send(
            replace(
                message,
                times_K7=np.concatenate([message.times_K7, [own]]),
                tables_KSB=message.tables_KSB[1:],
                not_finite_S=np.maximum(message.not_finite_S, marks),
                values=values,
            )
        )

    def _send(self, message: Message) -> None:
        buffer = self._sender.reserve(message.num_bytes(), time.monotonic() + self._deadline_s)
        message.write_into(buffer)
        self._sender.commit()
