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
#: A value is an outlier, and kept as it is, when it is more than this many times as large as the mean of its row.
_OUTLIER_RATIO = 5.5
#: Rows whose values are smaller than such an outlier become zeros.
_SMALLEST_LIMIT = 2.0**-90
_SMALLEST_SHARE = 2.0**-19


def round_inputs(x_TI: torch.Tensor, codes: InputCodes = "int16") -> torch.Tensor:
    """x_TI as native kernels see it beside int8 and int4 weights, with a scale for each INPUT_GROUP inputs.

    int16: portable and AVX2. int8, with outliers in fp32: AVX-512 (encode_groups.cpp).
    """
    if codes == "int16":
        groups_TGI = _grouped(x_TI)
        scale = groups_TGI.abs().amax(dim=-1, keepdim=True) / _INT16_MAX
        inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
        rounded_TGI = torch.round(groups_TGI * inverse) * scale
    else:
        steps_TGI, step_T = _row_steps(x_TI)
        rounded_TGI = steps_TGI * step_T[..., None, None]
    return rounded_TGI.flatten(-2)[..., : x_TI.shape[-1]]


def _grouped(x_TI: torch.Tensor) -> torch.Tensor:
    filled = torch.nn.functional.pad(x_TI.to(torch.float32), (0, -x_TI.shape[-1] % INPUT_GROUP))
    return filled.reshape(*filled.shape[:-1], -1, INPUT_GROUP)


def _row_steps(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in groups, as int8 codes have them, in steps of their row, and these steps.

    The step of a group is that of its row times the smallest 2^a + 2^b, b >= a - 3, that holds its values.
    """
    limit_T = (_OUTLIER_RATIO * x_TI.to(torch.float32).abs().mean(dim=-1)).contiguous()
    limit_T = limit_T.view(torch.int32).bitwise_and(-0x10000).view(torch.float32)
    groups_TGI, limit_T11 = _grouped(x_TI), limit_T[..., None, None]
    inverse = torch.where(limit_T11 < _SMALLEST_LIMIT, torch.zeros_like(limit_T11), _INT8_MAX / limit_T11)
    is_outlier = groups_TGI.abs() > limit_T11
    rest = torch.where(is_outlier, torch.zeros_like(groups_TGI), groups_TGI)
    mantissa, exponent = torch.frexp(rest.abs().amax(dim=-1, keepdim=True) * (1.0 / limit_T11))
    choices = torch.tensor([0.5, 0.5625, 0.625, 0.75, 1.0])
    steps = choices[torch.bucketize(mantissa, choices[:-1])]
    share = torch.ldexp(steps, exponent).clamp(min=_SMALLEST_SHARE)
    codes = torch.round(rest * (inverse / share))
    return torch.where(is_outlier, groups_TGI * inverse, codes * share), limit_T / _INT8_MAX


def _sum_errors(x_TI: torch.Tensor) -> torch.Tensor:
    """What rounding adds to the sums of groups, by which minimums are multiplied: codes of less than 2^16 in all."""
    steps_TGI, step_T = _row_steps(x_TI)
    sums_TG = steps_TGI.sum(dim=-1)
    magnitudes = sums_TG.abs()
    least_T1 = torch.maximum(
        magnitudes.sum(dim=-1, keepdim=True) / (65535.0 - sums_TG.shape[-1]),
        magnitudes.amax(dim=-1, keepdim=True) / _INT16_MAX,
    )
    mantissa, exponent = torch.frexp(least_T1)
    unit_T1 = torch.ldexp(torch.where(mantissa == 0.5, 0.5, 1.0), exponent)
    return (torch.round(sums_TG / unit_T1) * unit_T1 - sums_TG) * step_T[..., None]


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
        minimum = None if input_codes == "int16" or grouped.minimum_OG is None else grouped.minimum_OG.to(torch.float32)

        def integers(x_TI: torch.Tensor) -> torch.Tensor:
            y_TO = torch.nn.functional.linear(round_inputs(x_TI, input_codes), rounded, bias)
            return y_TO if minimum is None else y_TO + torch.nn.functional.linear(_sum_errors(x_TI), minimum)

        return integers
    if isinstance(weight_OI, GroupedTensor):
        weight_OI = weight_OI.to_fp32()
    if precision == "bf16":
        weight = weight_OI.to(torch.bfloat16).to(torch.float32)

        def bf16(x_TI: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x_TI.to(torch.bfloat16).to(torch.float32), weight, bias)

        return bf16
    exact = weight_OI.to(torch.float32)
    return lambda x_TI: torch.nn.functional.linear(x_TI, exact, bias)
