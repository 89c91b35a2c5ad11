"""Weights of 8 or 4 bits, in groups of inputs that share a scale: weight = code * scale + minimum.

These are the blocks of GGUF's Q8_0, Q4_0 and Q4_1, so that such tensors are taken over exactly.
Shapes: O outputs, I inputs, G groups of INPUT_GROUP inputs (the last one may be shorter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

#: Inputs that share a scale.
INPUT_GROUP = 32

GroupedPrecision = Literal["int8", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class GroupedTensor:
    """A matrix [O, I]. int4 codes are 0..15, int8 codes -128..127."""

    precision: GroupedPrecision
    codes_OI: torch.Tensor
    #: fp16.
    scale_OG: torch.Tensor
    #: fp16; None: all zero.
    minimum_OG: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes_OI.shape[0], self.codes_OI.shape[1])

    def to_fp32(self) -> torch.Tensor:
        """The weights that the codes stand for, as gguf dequantises them."""
        scale = _per_input(self.scale_OG, self.shape[1])
        values = self.codes_OI.to(torch.float32) * scale
        return values if self.minimum_OG is None else values + _per_input(self.minimum_OG, self.shape[1])

    def permuted(self, rows: torch.Tensor) -> GroupedTensor:
        """Its rows in another order."""
        minimum = None if self.minimum_OG is None else self.minimum_OG[rows]
        return GroupedTensor(
            precision=self.precision,
            codes_OI=self.codes_OI[rows],
            scale_OG=self.scale_OG[rows],
            minimum_OG=minimum,
        )


def stack_rows(parts: Sequence[GroupedTensor]) -> GroupedTensor:
    """The rows of all parts in order. Parts of both precisions become int8, whose codes hold those of int4."""
    precision: GroupedPrecision = "int4" if all(part.precision == "int4" for part in parts) else "int8"
    minimum = None
    if any(part.minimum_OG is not None for part in parts):
        minimum = torch.cat(
            [torch.zeros_like(part.scale_OG) if part.minimum_OG is None else part.minimum_OG for part in parts]
        )
    return GroupedTensor(
        precision=precision,
        codes_OI=torch.cat([part.codes_OI for part in parts]),
        scale_OG=torch.cat([part.scale_OG for part in parts]),
        minimum_OG=minimum,
    )


def group_rows(weight_OI: torch.Tensor, precision: GroupedPrecision) -> GroupedTensor:
    """Quantises a matrix between the smallest and the largest value of each group."""
    num_inputs = weight_OI.shape[1]
    filled = torch.nn.functional.pad(weight_OI.to(torch.float32), (0, -num_inputs % INPUT_GROUP))
    groups_OGI = filled.reshape(len(filled), -1, INPUT_GROUP)
    smallest, largest = (-128, 127) if precision == "int8" else (0, 15)
    low = groups_OGI.amin(dim=-1).to(torch.float16).to(torch.float32)
    scale = ((groups_OGI.amax(dim=-1) - low) / (largest - smallest)).to(torch.float16)
    minimum = (low - smallest * scale.to(torch.float32)).to(torch.float16)
    shifted = groups_OGI - minimum[..., None].to(torch.float32)
    exact = scale.to(torch.float32)[..., None]
    codes = torch.where(exact > 0, torch.round(shifted / exact), torch.zeros_like(shifted)).clamp(smallest, largest)
    return GroupedTensor(
        precision=precision,
        codes_OI=codes.to(torch.int8).reshape(len(filled), -1)[:, :num_inputs].contiguous(),
        scale_OG=scale,
        minimum_OG=minimum,
    )


def _per_input(values_OG: torch.Tensor, num_inputs: int) -> torch.Tensor:
    return values_OG.to(torch.float32).repeat_interleave(INPUT_GROUP, dim=1)[:, :num_inputs]
