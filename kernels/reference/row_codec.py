"""Rows of K or V as a block holds them in any precision: bytes, and scales where they are quantised."""

from __future__ import annotations

import torch

from remora.kernels.reference.quantise import dequantise, quantise
from remora.namespaces.geometry import QUANTISED, Precision

#: Of what is not quantised.
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def encode_rows(rows: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] → bytes [..., bytes a row] (uint8) and scales [..., G] (bf16), rounded to the precision.

    G is 0 for what has no scales.
    """
    if precision in QUANTISED:
        return quantise(rows, precision)
    codes = rows.to(TORCH_DTYPES[precision]).contiguous().view(torch.uint8)
    return codes, codes.new_empty((*rows.shape[:-1], 0), dtype=torch.bfloat16)


def decode_rows(codes: torch.Tensor, scales: torch.Tensor, head_dim: int, precision: Precision) -> torch.Tensor:
    """The values [..., D] in fp32 that bytes and scales of `encode_rows` stand for."""
    if precision in QUANTISED:
        return dequantise(codes, scales, head_dim, precision)
    return codes.contiguous().view(TORCH_DTYPES[precision]).to(torch.float32)
