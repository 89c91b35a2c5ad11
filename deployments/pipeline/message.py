"""What travels from stage to stage: one micro-batch, as bytes that are written and read in place.

    words      16 numbers of 8 bytes: kind, ticket, counts, when it was sent
    times      [K][7] fp64: what each stage did so far (MicroTime)
    tables     [stages behind][S][B] int32: physical blocks, those of the receiving stage first
    sequences  query_start [S + 1], context_len [S], logit_rows [R] int32; not_finite [S] uint8
    fault      UTF-8: why the micro-batch is not computed any further, as "ErrorClass: sentence"
    values     fp32, 64-byte aligned: hidden states [T][H], or, behind the last stage, logits [R][V]

Positions follow from context_len. Shapes as in base.py; K stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remora.deployments.pipeline.base import Float32, Int32
from remora.kernels.batch import StepBatch

Bytes = NDArray[np.uint8]

_NUM_WORDS: Final = 16
_ALIGN: Final = 64
#: Longest sentence about a fault, in bytes.
MAX_FAULT_BYTES: Final = 2048


class Kind(IntEnum):
    WORK = 0
    #: Goes through all stages and comes back: nothing is under way before it.
    DRAIN = 1


class MicroTime(NamedTuple):
    """What one stage did for one micro-batch; see base.StageTime. Wall clock in seconds."""

    start_unix_s: float = 0.0
    end_unix_s: float = 0.0
    compute_s: float = 0.0
    turn_wait_s: float = 0.0
    bubble_s: float = 0.0
    hop_s: float = 0.0
    hop_bytes: float = 0.0


@dataclass(slots=True, kw_only=True)
class Message:
    """One micro-batch. Of a message that was read, arrays are views of the channel's memory."""

    kind: Kind = Kind.WORK
    ticket: int = 0
    #: Number of the micro-batch in its step, from 0.
    micro: int = 0
    num_tokens: int = 0
    sent_unix_s: float = 0.0
    times_K7: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(MicroTime._fields))))
    tables_KSB: Int32 = field(default_factory=lambda: np.zeros((0, 0, 0), np.int32))
    query_start_S: Int32 = field(default_factory=lambda: np.zeros(1, np.int32))
    context_len_S: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    logit_rows_R: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    not_finite_S: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    fault: str = ""
    values: Float32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        fault = np.frombuffer(self.fault.encode()[:MAX_FAULT_BYTES], np.uint8)
        return (
            *(self.times_K7, self.tables_KSB, self.query_start_S, self.context_len_S, self.logit_rows_R),
            *(self.not_finite_S, fault, self.values),
        )

    def num_bytes(self) -> int:
        total = _NUM_WORDS * 8
        for array in self._arrays():
            total = _aligned(total) + array.nbytes
        return total

    def write_into(self, buffer: Bytes) -> None:
        """Fills a buffer of `num_bytes`. Stamps it as sent now, before the bytes are copied."""
        arrays = self._arrays()
        words = buffer[: _NUM_WORDS * 8].view(np.int64)
        words[:12] = (
            *(self.kind, self.ticket, self.micro, self.num_tokens, time.time_ns(), len(self.times_K7)),
            *(*self.tables_KSB.shape, len(self.logit_rows_R), arrays[6].nbytes, self.values.shape[1]),
        )
        words[12:14] = len(self.values), len(self.context_len_S)
        end = _NUM_WORDS * 8
        for array in arrays:
            begin = _aligned(end)
            end = begin + array.nbytes
            buffer[begin:end].view(array.dtype)[:] = array.reshape(-1)

    @staticmethod
    def read(buffer: Bytes) -> Message:
        """The message in a buffer, whose memory it shares."""
        words = buffer[: _NUM_WORDS * 8].view(np.int64).tolist()
        kind, ticket, micro, num_tokens, sent_ns, num_stages = words[:6]
        num_tables, table_rows, num_columns, num_rows, fault_bytes, value_columns, value_rows, num_sequences = words[
            6:14
        ]
        end = _NUM_WORDS * 8

        def take(dtype: type[np.generic], *shape: int) -> NDArray[Any]:
            nonlocal end
            begin = _aligned(end)
            end = begin + int(np.prod(shape)) * np.dtype(dtype).itemsize
            return buffer[begin:end].view(dtype).reshape(shape)

        return Message(
            kind=Kind(kind),
            ticket=ticket,
            micro=micro,
            num_tokens=num_tokens,
            sent_unix_s=sent_ns * 1e-9,
            times_K7=take(np.float64, num_stages, len(MicroTime._fields)),
            tables_KSB=take(np.int32, num_tables, table_rows, num_columns),
            query_start_S=take(np.int32, num_sequences + 1),
            context_len_S=take(np.int32, num_sequences),
            logit_rows_R=take(np.int32, num_rows),
            not_finite_S=take(np.uint8, num_sequences),
            fault=take(np.uint8, fault_bytes).tobytes().decode(errors="replace"),
            values=take(np.float32, value_rows, value_columns),
        )

    def fill(self, batch: StepBatch) -> None:
        """The micro-batch as the receiving stage computes it; token ids stay behind."""
        num_sequences, num_columns = len(self.context_len_S), self.tables_KSB.shape[2]
        query_start = self.query_start_S
        batch.query_start_S[: num_sequences + 1] = query_start
        batch.context_len_S[:num_sequences] = self.context_len_S
        first_S = self.context_len_S - query_start[1:]
        batch.positions_T[: self.num_tokens] = np.repeat(first_S, np.diff(query_start))
        batch.positions_T[: self.num_tokens] += np.arange(self.num_tokens, dtype=np.int32)
        batch.block_table_SB[:num_sequences, :num_columns] = self.tables_KSB[0]
        batch.logit_rows_R[: len(self.logit_rows_R)] = self.logit_rows_R
        batch.num_tokens, batch.num_sequences = self.num_tokens, num_sequences
        batch.num_logit_rows = len(self.logit_rows_R)


def forward_bytes(*, num_stages: int, num_sequences: int, num_columns: int, num_tokens: int, hidden_size: int) -> int:
    """Bound of a message with hidden states."""
    tables = 4 * num_stages * num_sequences * num_columns
    return _small_bytes(num_stages, num_sequences) + tables + 4 * num_sequences + 4 * num_tokens * (1 + hidden_size)


def result_bytes(*, num_stages: int, num_sequences: int, num_logits: int, vocab_size: int) -> int:
    """Bound of what comes out of the last stage."""
    return _small_bytes(num_stages, num_sequences) + 4 * num_logits * (1 + vocab_size)


def _small_bytes(num_stages: int, num_sequences: int) -> int:
    times = 8 * num_stages * len(MicroTime._fields)
    return 8 * _NUM_WORDS + 9 * _ALIGN + MAX_FAULT_BYTES + times + 9 * num_sequences + 4


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
