"""Fills the step's batch in place: what did not change since the last step is not written again."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from remora.deployments.engine.scheduler import Scheduled
from remora.kernels.batch import StepBatch
from remora.platform.base.ids import SequenceId


class BatchFiller:
    """Owns a StepBatch. Rows of tables are recognised by run and edit: a table only grows in between."""

    def __init__(self, *, max_tokens: int, max_sequences: int, max_blocks: int) -> None:
        self.batch = StepBatch(max_tokens=max_tokens, max_sequences=max_sequences, max_blocks=max_blocks)
        self._row_tables: list[tuple[SequenceId | None, int]] = [(None, 0)] * max_sequences
        self._row_num_blocks = [0] * max_sequences
        self._steps_T = np.arange(max_tokens + 1, dtype=np.int32)

    def fill(self, plan: Items[Scheduled]) -> StepBatch:
        """The batch of this plan, valid until the next call. Sequences with one token come first in the plan."""
        batch = self.batch
        context_lens, ends, tokens, logit_rows = [], [], [], []
        num_single = 0
        for sequence, num_tokens in plan:
            if num_tokens != 1:
                break
            tokens.append(int(sequence.token_ids[sequence.num_begun_tokens]))
            context_lens.append(sequence.num_begun_tokens + 1)
            if sequence.num_pending_tokens == 1:
                logit_rows.append(num_single)
            num_single += 1
        batch.token_ids_T[:num_single] = tokens
        batch.positions_T[:num_single] = context_lens
        batch.positions_T[:num_single] -= 1
        end = num_single
        for scheduled in plan[num_single:]:
            sequence, num_tokens = scheduled
            start, first = end, sequence.num_begun_tokens
            end = start + num_tokens
            batch.token_ids_T[start:end] = sequence.token_ids[first : first + num_tokens]
            np.add(self._steps_T[:num_tokens], first, out=batch.positions_T[start:end])
            context_lens.append(first + num_tokens)
            ends.append(end)
            if scheduled.wants_logits:
                logit_rows.append(end - 1)
        batch.context_len_S[: len(plan)] = context_lens
        batch.query_start_S[: num_single + 1] = self._steps_T[: num_single + 1]
        batch.query_start_S[num_single + 1 : len(plan) + 1] = ends
        batch.logit_rows_R[: len(logit_rows)] = logit_rows
        batch.num_tokens, batch.num_sequences, batch.num_logit_rows = end, len(plan), len(logit_rows)
        self._fill_tables(plan)
        return batch

    def _fill_tables(self, plan: Items[Scheduled]) -> None:
        tables_SB = self.batch.block_table_SB
        for row, (sequence, _) in enumerate(plan):
            num_blocks, num_known = sequence.num_blocks, self._row_num_blocks[row]
            if self._row_tables[row] != (sequence.sequence_id, sequence.table_no):
                self._row_tables[row] = (sequence.sequence_id, sequence.table_no)
                # Columns of the row's last owner go back to 0, as the batch promises.
                tables_SB[row, num_blocks:num_known] = 0
                num_known = 0
            if num_known != num_blocks:
                tables_SB[row, num_known:num_blocks] = sequence.blocks[num_known:num_blocks]
                self._row_num_blocks[row] = num_blocks
