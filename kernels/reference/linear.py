"""Linear layers in each weight precision. Shapes: T tokens, I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remora.kernels.base import WeightPrecision
from remora.kernels.grouped import INPUT_GROUP, GroupedTensor, group_rows

_INT16_MAX = 32767.0


def round_inputs(x_TI: torch.Tensor) -> torch.Tensor:
    """x_TI as native kernels see it beside int8 and int4 weights: int16 with a scale for each INPUT_GROUP inputs."""
    num_inputs = x_TI.shape[-1]
    filled = torch.nn.functional.pad(x_TI.to(torch.float32), (0, -num_inputs % INPUT_GROUP))
    groups = filled.reshape(*filled.shape[:-1], -1, INPUT_GROUP)
    scale = groups.abs().amax(dim=-1, keepdim=True) / _INT16_MAX
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    return (torch.round(groups * inverse) * scale).flatten(-2)[..., :num_inputs]


def make_linear(
    weight_OI: torch.Tensor | GroupedTensor, bias_O: torch.Tensor | None, precision: WeightPrecision
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x_TI fp32 → x · weightᵀ + bias in fp32, with the rounding of the native kernels of that precision.

    fp32: none. bf16: weights and inputs are rounded to bf16, sums are fp32. int8 and int4: weights as GroupedTensor,
    inputs as `round_inputs` has them, sums in fp32.

    Weights are held as fp32 in every precision: torch's own bf16 product rounds its sums too, and is slower than
    fp32 on processors without bf16 instructions.
    """
    bias = None if bias_O is None else bias_O.to(torch.float32)
    if precision in ("int8", "int4"):
        grouped = weight_OI if isinstance(weight_OI, GroupedTensor) else group_rows(weight_OI, precision)
        rounded = grouped.to_fp32()
        return lambda x_TI: torch.nn.functional.linear(round_inputs(x_TI), rounded, bias)
    if isinstance(weight_OI, GroupedTensor):
        weight_OI = weight_OI.to_fp32()
    if precision == "bf16":
        weight = weight_OI.to(torch.bfloat16).to(torch.float32)

        def bf16(x_TI: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x_TI.to(torch.bfloat16).to(torch.float32), weight, bias)

        return bf16
    exact = weight_OI.to(torch.float32)
    return lambda x_TI: torch.nn.functional.linear(x_TI, exact, bias)
