"""What must be true of a step before anything of it is computed, and where its rows go; on the host, without torch.

Shapes: T tokens of the step, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch
from remora.platform.base.errors import KernelError

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Which sequence each token is of, and the block and slot that its K and V go to."""

    sequence_T: Int32
    block_T: Int32
    slot_T: Int32


def check_step(batch: StepBatch, *, block_tokens: int, vocab_size: int | None) -> StepRows:
    """Raises KernelError for a batch that contradicts itself, or a token outside the vocabulary, where one is given.

    Whether blocks lie inside the memory is not looked at; only those of the table that contexts reach are used.
    """
    num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
    if num_tokens < 1 or num_sequences < 1:
        raise KernelError("a step without tokens")
    starts = batch.query_start_S[: num_sequences + 1]
    counts_S = np.diff(starts)
    if starts[0] != 0 or starts[-1] != num_tokens or counts_S.min() < 1:
        raise KernelError(f"query_start does not ascend from 0 to {num_tokens}: every sequence has rows of its own")
    lengths_S, positions_T = batch.context_len_S[:num_sequences], batch.positions_T[:num_tokens]
    sequence_T = np.repeat(np.arange(num_sequences, dtype=np.int32), counts_S)
    expected_T = np.arange(num_tokens, dtype=np.int32) + np.repeat(lengths_S - starts[1:], counts_S)
    if (lengths_S < counts_S).any() or (positions_T != expected_T).any():
        raise KernelError("positions of a sequence do not end at the end of its context")
    rows_R = batch.logit_rows_R[: batch.num_logit_rows]
    if rows_R.size and (rows_R[0] < 0 or rows_R[-1] >= num_tokens or (np.diff(rows_R) < 1).any()):
        raise KernelError(f"a logit row lies outside the {num_tokens} rows of the step, or they do not ascend")
    token_ids_T = batch.token_ids_T[:num_tokens]
    if vocab_size is not None and (token_ids_T.min() < 0 or token_ids_T.max() >= vocab_size):
        raise KernelError(f"a token id lies outside the vocabulary of {vocab_size}")
    columns_T = positions_T // block_tokens
    if columns_T.max() >= batch.block_table_SB.shape[1]:
        raise KernelError(f"{lengths_S.max()} tokens need {columns_T.max() + 1} columns of the block table")
    return StepRows(
        sequence_T=sequence_T,
        block_T=batch.block_table_SB[sequence_T, columns_T],
        slot_T=positions_T % block_tokens,
    )
