"""Linear layers in each weight precision. Shapes: T tokens, I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from remora.kernels.base import WeightPrecision
from remora.kernels.grouped import INPUT_GROUP, GroupedTensor, group_rows

#: The number of bits of activations beside int8 and int4 weights: what a level multiplies.
InputCodes = Literal["int16", "int8"]

_INT16_MAX = 32767.0
_INT8_MAX = 127.0
#: With a remainder: steps of 256 and what is left of them.
_LONG_MAX = 127.0 * 256.0 + 127.0
#: A group has a remainder when its largest value is more than this many times the root mean square of its row.
_OUTLIER_RATIO = 5.0


def round_inputs(x_TI: torch.Tensor, codes: InputCodes = "int16") -> torch.Tensor:
    """x_TI as native kernels see it beside int8 and int4 weights, with a scale for each INPUT_GROUP inputs.

    int16: portable and AVX2. int8, with eight bits more for groups that hold outliers: AVX-512 (encode_groups.cpp).
    """
    num_inputs = x_TI.shape[-1]
    x_TI = x_TI.to(torch.float32)
    filled = torch.nn.functional.pad(x_TI, (0, -num_inputs % INPUT_GROUP))
    groups = filled.reshape(*filled.shape[:-1], -1, INPUT_GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    if codes == "int16":
        most: torch.Tensor | float = _INT16_MAX
    else:
        outlier = _OUTLIER_RATIO * x_TI.square().mean(dim=-1).sqrt()[..., None, None]
        most = torch.where(largest > outlier, _LONG_MAX, _INT8_MAX)
    scale = largest / most
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    return (torch.round(groups * inverse) * scale).flatten(-2)[..., :num_inputs]


def make_linear(
    weight_OI: torch.Tensor | GroupedTensor,
    bias_O: torch.Tensor | None,
    precision: WeightPrecision,
    input_codes: InputCodes = "int16",
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x_TI fp32 → x · weightᵀ + bias in fp32, with the rounding of the native kernels of that precision.

    fp32: none. bf16: weights and inputs are rounded to bf16, sums are fp32. int8 and int4: weights as GroupedTensor,
    inputs as `round_inputs` has them with `input_codes`, sums in fp32.

    Weights are held as fp32 in every precision: torch's own bf16 product rounds its sums too, and is slower than
    fp32 on processors without bf16 instructions.
    """
    bias = None if bias_O is None else bias_O.to(torch.float32)
    if precision in ("int8", "int4"):
        grouped = weight_OI if isinstance(weight_OI, GroupedTensor) else group_rows(weight_OI, precision)
        rounded = grouped.to_fp32()
        return lambda x_TI: torch.nn.functional.linear(round_inputs(x_TI, input_codes), rounded, bias)
    if isinstance(weight_OI, GroupedTensor):
        weight_OI = weight_OI.to_fp32()
    if precision == "bf16":
        weight = weight_OI.to(torch.bfloat16).to(torch.float32)

        def bf16(x_TI: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x_TI.to(torch.bfloat16).to(torch.float32), weight, bias)

        return bf16
    exact = weight_OI.to(torch.float32)
    return lambda x_TI: torch.nn.functional.linear(x_TI, exact, bias)
