"""Cutting a step into micro-batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.pipeline.micro_batches import cut_step, fill_micro_batch
from remora.kernels.batch import StepBatch

BLOCK_TOKENS = 16


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 50), st.sampled_from(["none", "last", "all"])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 50),
    st.integers(1, 4),
)
def test_micro_batches_are_the_rows_of_the_step_in_order(
    sequences: list[tuple[int, int, str]], max_tokens: int, num_groups: int
) -> None:
    step, micro = (StepBatch(max_tokens=300, max_sequences=8, max_blocks=6) for _ in range(2))
    for number, (num_tokens, first_position, logits) in enumerate(sequences):
        tokens = np.arange(num_tokens, dtype=np.int32) + 100 * number
        step.add(tokens, first_position=first_position, blocks=[10 * number + i for i in range(6)], logits=logits)
    ranges = cut_step(step, max_tokens=max_tokens, num_groups=num_groups)
    assert len(ranges) == max(-(-step.num_tokens // max_tokens), min(num_groups, step.num_tokens))
    rows, logit_rows = [], []
    for part in ranges:
        fill_micro_batch(micro, step, part, 6)
        assert 0 < micro.num_tokens <= max_tokens
        assert micro.query_start_S[0] == 0
        assert micro.query_start_S[micro.num_sequences] == micro.num_tokens
        for sequence in range(micro.num_sequences):
            begin, end = micro.query_start_S[sequence : sequence + 2]
            assert begin < end
            assert micro.context_len_S[sequence] == micro.positions_T[end - 1] + 1
            for row in range(begin, end):
                rows.append((micro.token_ids_T[row], micro.positions_T[row], micro.block_table_SB[sequence, 1]))
        logit_rows += [part.first_row + int(row) for row in micro.logit_rows_R[: micro.num_logit_rows]]
    owners = np.repeat(np.arange(step.num_sequences), np.diff(step.query_start_S[: step.num_sequences + 1]))
    assert rows == [
        (step.token_ids_T[row], step.positions_T[row], 10 * owners[row] + 1) for row in range(step.num_tokens)
    ]
    assert logit_rows == step.logit_rows_R[: step.num_logit_rows].tolist()
