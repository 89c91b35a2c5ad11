"""The batch that is filled in place is the one that would be built from nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.engine.batch_filler import BatchFiller
from remora.deployments.engine.scheduler import Scheduled
from remora.kernels.batch import StepBatch

BLOCK_TOKENS = 4
SIZES = {"max_tokens": 64, "max_sequences": 5, "max_blocks": 12}


def a_run(number: int, rng: np.random.Generator) -> SimpleNamespace:
    """What the filler reads of a sequence."""
    num_tokens = int(rng.integers(1, 30))
    run = SimpleNamespace(
        table_no=0,
        sequence_id=f"run-{number}",
        token_ids=rng.integers(0, 99, 48).astype(np.int32),
        num_computed_tokens=int(rng.integers(0, num_tokens)),
        num_tokens=num_tokens,
        blocks=np.zeros(12, np.int32),
        num_blocks=-(-num_tokens // BLOCK_TOKENS),
    )
    run.blocks[:] = rng.permutation(1000)[:12]
    return run


@given(st.integers(0, 2**32 - 1))
def test_filling_in_place_equals_building_anew(seed) -> None:
    rng = np.random.default_rng(seed)
    filler = BatchFiller(**SIZES)
    runs = [a_run(number, rng) for number in range(6)]
    for step in range(12):
        if rng.random() < 0.3:
            runs[int(rng.integers(6))] = a_run(100 + step, rng)
        chosen = [runs[i] for i in rng.permutation(6)[: int(rng.integers(1, 6))]]
        plan = []
        for run in chosen:
            run.num_begun_tokens = run.num_computed_tokens
            run.num_pending_tokens = run.num_tokens - run.num_begun_tokens
            plan.append(Scheduled(run, int(rng.integers(1, min(run.num_pending_tokens, 10) + 1))))
        plan.sort(key=lambda scheduled: scheduled.num_tokens != 1)
        expected = StepBatch(**SIZES)
        expected.clear()
        for run, num_tokens in plan:
            first = run.num_computed_tokens
            expected.add(
                run.token_ids[first : first + num_tokens],
                first_position=first,
                blocks=run.blocks[: run.num_blocks],
                logits="last" if num_tokens == run.num_pending_tokens else "none",
            )
        batch = filler.fill(plan)
        assert (batch.num_tokens, batch.num_sequences, batch.num_logit_rows) == (
            expected.num_tokens,
            expected.num_sequences,
            expected.num_logit_rows,
        )
        t, s, r = batch.num_tokens, batch.num_sequences, batch.num_logit_rows
        assert (batch.token_ids_T[:t] == expected.token_ids_T[:t]).all()
        assert (batch.positions_T[:t] == expected.positions_T[:t]).all()
        assert (batch.query_start_S[: s + 1] == expected.query_start_S[: s + 1]).all()
        assert (batch.context_len_S[:s] == expected.context_len_S[:s]).all()
        assert (batch.logit_rows_R[:r] == expected.logit_rows_R[:r]).all()
        # Unused columns too: they hold 0, as the batch promises.
        assert (batch.block_table_SB[:s] == expected.block_table_SB[:s]).all()
        for run, num_tokens in plan:
            run.num_computed_tokens += num_tokens
            if run.num_computed_tokens == run.num_tokens and run.num_tokens < 47:
                run.num_tokens += 1
                run.num_blocks = -(-run.num_tokens // BLOCK_TOKENS)
