"""Linear layers in each weight precision. Shapes: T tokens, I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remora.kernels.base import WeightPrecision

_INT8_MAX = 127.0
#: Inputs that share an activation scale. With one scale a row, a few large inputs leave the others too few bits.
INT8_GROUP = 64


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row: values -127..127 held as fp32, and scale per row; a row of zeros has scale 0."""
    x = x.to(torch.float32)
    scale = x.abs().amax(dim=-1, keepdim=True) / _INT8_MAX
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    return torch.round(x * inverse), scale


def quantize_groups(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 for every INT8_GROUP inputs of a row: values [T, groups, INT8_GROUP] and scales [T, groups, 1].

    The last group is filled up with zeros.
    """
    num_inputs = x_TI.shape[-1]
    filled = torch.nn.functional.pad(x_TI.to(torch.float32), (0, -num_inputs % INT8_GROUP))
    return quantize_rows(filled.reshape(*filled.shape[:-1], -1, INT8_GROUP))


def make_linear(
    weight_OI: torch.Tensor, bias_O: torch.Tensor | None, precision: WeightPrecision
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x_TI fp32 → x · weightᵀ + bias in fp32, with the rounding of the native kernels of that precision.

    fp32: none. bf16: weights and inputs are rounded to bf16, sums are fp32. int8: weights per output channel and
    inputs per INT8_GROUP are symmetric int8, sums of a group exact, their sum in fp32.

    Weights are held as fp32 in every precision: torch's own bf16 product rounds its sums too, and is slower than
    fp32 on processors without bf16 instructions.
    """
    bias = None if bias_O is None else bias_O.to(torch.float32)
    if precision == "int8":
        rounded, scale = quantize_rows(weight_OI)
        scale_O = scale.squeeze(-1)

        def int8(x_TI: torch.Tensor) -> torch.Tensor:
            quantized, scales = quantize_groups(x_TI)
            rounded_inputs = (quantized * scales).flatten(-2)[..., : x_TI.shape[-1]]
            y = torch.nn.functional.linear(rounded_inputs, rounded) * scale_O
            return y if bias is None else y + bias

        return int8
    if precision == "bf16":
        weight = weight_OI.to(torch.bfloat16).to(torch.float32)

        def bf16(x_TI: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x_TI.to(torch.bfloat16).to(torch.float32), weight, bias)

        return bf16
    exact = weight_OI.to(torch.float32)
    return lambda x_TI: torch.nn.functional.linear(x_TI, exact, bias)
