"""Cutting a step into micro-batches: consecutive rows of its batch, so that chunks of a prompt stay in order.

Shapes: T tokens of the step, S sequences, R rows with logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remora.kernels.batch import StepBatch


class RowRange(NamedTuple):
    """Rows [first_row, end_row) of a step and what they belong to; ranges are half-open."""

    first_row: int
    end_row: int
    first_sequence: int
    end_sequence: int
    first_logit: int
    end_logit: int


def cut_step(batch: StepBatch, *, max_tokens: int, num_groups: int = 1) -> list[RowRange]:
    """As few micro-batches of nearly equal length as `max_tokens` and `num_groups` (at least so many) ask for.

    Every micro-batch reads all weights once more: a step of decoding sequences is cut only if num_groups says so.
    """
    num_rows = batch.num_tokens
    count = max(-(-num_rows // max_tokens), min(num_groups, num_rows))
    ends = [num_rows * (index + 1) // count for index in range(count)]
    query_start = batch.query_start_S[: batch.num_sequences + 1]
    logit_rows = batch.logit_rows_R[: batch.num_logit_rows]
    firsts = [0, *ends[:-1]]
    first_sequences = np.searchsorted(query_start, firsts, side="right") - 1
    end_sequences = np.searchsorted(query_start, ends, side="left")
    logit_ends = np.searchsorted(logit_rows, ends, side="left")
    return [
        RowRange(first, end, int(first_sequence), int(end_sequence), int(first_logit), int(end_logit))
        for first, end, first_sequence, end_sequence, first_logit, end_logit in zip(
            firsts, ends, first_sequences, end_sequences, [0, *logit_ends[:-1]], logit_ends, strict=True
        )
    ]


def fill_micro_batch(target: StepBatch, step: StepBatch, rows: RowRange, num_columns: int) -> None:
    """Makes `target` the micro-batch of these rows, with the first `num_columns` columns of the tables."""
    first, end, first_sequence, end_sequence, first_logit, end_logit = rows
    num_rows, num_sequences, num_logits = end - first, end_sequence - first_sequence, end_logit - first_logit
    sequences = slice(first_sequence, end_sequence)
    target.token_ids_T[:num_rows] = step.token_ids_T[first:end]
    target.positions_T[:num_rows] = step.positions_T[first:end]
    query_start = step.query_start_S[first_sequence : end_sequence + 1]
    np.clip(query_start, first, end, out=target.query_start_S[: num_sequences + 1])
    target.query_start_S[: num_sequences + 1] -= first
    # Only the last sequence can go on behind the micro-batch.
    target.context_len_S[:num_sequences] = step.context_len_S[sequences]
    target.context_len_S[num_sequences - 1] -= query_start[-1] - min(end, int(query_start[-1]))
    target.block_table_SB[:num_sequences, :num_columns] = step.block_table_SB[sequences, :num_columns]
    target.logit_rows_R[:num_logits] = step.logit_rows_R[first_logit:end_logit]
    target.logit_rows_R[:num_logits] -= first
    target.num_tokens, target.num_sequences, target.num_logit_rows = num_rows, num_sequences, num_logits
