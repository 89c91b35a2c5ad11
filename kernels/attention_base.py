"""What a paged attention on a GPU is; kernels/attention_backends.py chooses one.

Shapes: T tokens of the step, Q query heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch
from remora.kernels.layout import BlockLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeed:
    """What a decoder wants of its attention."""

    layout: BlockLayout
    num_heads: int
    scale: float
    #: Type of queries and outputs.
    values: Literal["fp32", "bf16"] = "bf16"
    #: A row's result must not depend on its neighbours or on how its prompt was cut, to the bit.
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """One layer of one step. Tensors are on the device of the arena; K and V of the step are stored already."""

    #: What `begin` made of the step.
    step: Any
    layer: int
    q_TQD: torch.Tensor
    #: The whole arena, uint8.
    data: torch.Tensor


class PagedAttention(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def batch_invariant(self) -> bool: ...

    def begin(self, batch: StepBatch, data: torch.Tensor | NDArray[np.uint8]) -> Any:
        """What the layers of a step share, on the device; `data` is the whole arena.

        Raises KernelError, before anything is queued, for a block outside the arena.
        """
        ...

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """out_TQD in the type of q, and lse_TQ (fp32, natural log)."""
        ...
