"""A step in the memory of a device: what every layer reads.

Shapes: T tokens of the step, S sequences, R rows with logits, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.attention_base import PagedAttention
from remora.kernels.batch import StepBatch
from remora.kernels.cuda.device import upload_together
from remora.kernels.cuda.runtime import Runtime
from remora.kernels.layout import BlockLayout
from remora.kernels.step_check import StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """A memory in one precision, and the attention that reads it."""

    data: torch.Tensor
    layout: BlockLayout
    attention: PagedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Tensors only: work that is captured reads nothing else of a step."""

    arena: Arena
    token_ids_T: torch.Tensor
    #: Where tokens are not embedded.
    hidden_TH: torch.Tensor | None
    positions_T: torch.Tensor
    block_T: torch.Tensor
    slot_T: torch.Tensor
    sequence_T: torch.Tensor
    logit_rows_R: torch.Tensor
    #: Filled by the step.
    not_finite_S: torch.Tensor
    #: What arena.attention made of the step.
    attention_step: Any


def upload_rows(
    runtime: Runtime, batch: StepBatch, rows: StepRows, arena: Arena, hidden_TH: NDArray[np.float32] | None
) -> DeviceRows:
    """Raises KernelError, before anything is queued, for a block outside the arena."""
    attention_step = arena.attention.begin(batch, arena.data)
    num_tokens = batch.num_tokens
    token_ids, positions, blocks, slots, sequences, logit_rows = upload_together(
        runtime,
        [
            batch.token_ids_T[:num_tokens],
            batch.positions_T[:num_tokens],
            *(rows.block_T, rows.slot_T, rows.sequence_T),
            batch.logit_rows_R[: batch.num_logit_rows],
        ],
    )
    return DeviceRows(
        arena=arena,
        token_ids_T=token_ids,
        hidden_TH=None if hidden_TH is None else runtime.upload(hidden_TH),
        positions_T=positions,
        block_T=blocks,
        slot_T=slots,
        sequence_T=sequences,
        logit_rows_R=logit_rows,
        not_finite_S=runtime.empty((batch.num_sequences,), np.uint8),
        attention_step=attention_step,
    )
