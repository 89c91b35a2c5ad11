"""One engine step's worth of work, as arrays that are allocated once and filled in place.

Shapes: T tokens of the step, S sequences, B table columns, R rows whose logits are wanted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from remora.platform.base.errors import KernelError

Int32 = NDArray[np.int32]


class StepBatch:
    """Tokens of all sequences of a step, concatenated; sequence s owns rows query_start[s]:query_start[s+1].

    Decode and prefill are the same thing: a sequence with one row decodes, with more rows it catches up.
    Row j of sequence s stands at position `context_len[s] - num_rows(s) + j` and sees positions up to its own.
    The new K/V of all rows is stored through the block table before attention reads it.
    """

    def __init__(self, *, max_tokens: int, max_sequences: int, max_blocks: int) -> None:
        self.token_ids_T: Int32 = np.zeros(max_tokens, np.int32)
        self.positions_T: Int32 = np.zeros(max_tokens, np.int32)
        self.query_start_S: Int32 = np.zeros(max_sequences + 1, np.int32)
        #: Tokens of the sequence after this step (last position + 1).
        self.context_len_S: Int32 = np.zeros(max_sequences, np.int32)
        #: Block indices in units of the geometry's block_bytes; unused columns hold 0 and are not read.
        self.block_table_SB: Int32 = np.zeros((max_sequences, max_blocks), np.int32)
        #: Rows (0..T-1, ascending) whose logits are wanted.
        self.logit_rows_R: Int32 = np.zeros(max_tokens, np.int32)
        #: Set by the forward pass: 1 where a K or V of the sequence is not finite, or its precision cannot hold it.
        self.not_finite_S: NDArray[np.uint8] = np.zeros(max_sequences, np.uint8)
        self.num_tokens = 0
        self.num_sequences = 0
        self.num_logit_rows = 0

    def clear(self) -> None:
        """Empties the batch; the arrays keep their memory."""
        self.num_tokens = self.num_sequences = self.num_logit_rows = 0
        self.query_start_S[0] = 0

    def add(
        self,
        token_ids: NDArray[np.int32] | list[int],
        *,
        first_position: int,
        blocks: NDArray[np.int32] | list[int],
        logits: str = "last",
    ) -> slice:
        """Appends one sequence's rows; `logits` is "none", "last" or "all". Returns the rows of logits_RV it owns.

        Raises KernelError when the batch is full.
        """
        num_rows = len(token_ids)
        start, row = self.num_tokens, self.num_sequences
        if num_rows == 0 or start + num_rows > len(self.token_ids_T) or row >= len(self.context_len_S):
            raise KernelError(
                f"step batch is full: {start} + {num_rows} tokens of {len(self.token_ids_T)}, "
                f"{row} sequences of {len(self.context_len_S)}"
            )
        if len(blocks) > self.block_table_SB.shape[1]:
            raise KernelError(f"{len(blocks)} blocks in a table of {self.block_table_SB.shape[1]} columns")
        end = start + num_rows
        self.token_ids_T[start:end] = token_ids
        self.positions_T[start:end] = np.arange(first_position, first_position + num_rows, dtype=np.int32)
        self.context_len_S[row] = first_position + num_rows
        self.block_table_SB[row, : len(blocks)] = blocks
        self.query_start_S[row + 1] = end
        first_logit = self.num_logit_rows
        if logits == "last":
            self.logit_rows_R[first_logit] = end - 1
            self.num_logit_rows += 1
        elif logits == "all":
            self.logit_rows_R[first_logit : first_logit + num_rows] = np.arange(start, end, dtype=np.int32)
            self.num_logit_rows += num_rows
        self.num_tokens, self.num_sequences = end, row + 1
        return slice(first_logit, self.num_logit_rows)
