"""K and V as int8 and int4: what a row of head_dim values becomes in a block, and what it stands for.

int8: symmetric, one scale a row, values -127..127. int4: the row is first rotated by a Hadamard matrix, which spreads a
few large values over all of them, then each INT4_GROUP values are symmetric -7..7 with a scale of their own; value i of
a group is the low half of byte i, value i + size / 2 the high half, both plus 8. Scales are bf16, rounded up, so that
no value exceeds the range. A group with a NaN or an infinity gets the scale NaN: whatever reads it is marked.

The operations and their order are those of the native kernels, bit by bit. Shapes: D head_dim, G scales a row.
"""

from __future__ import annotations

import torch

from remora.namespaces.geometry import INT4_GROUP, Precision

#: Groups whose largest value is smaller become zeros: the reciprocal of their scale would overflow.
_SMALLEST = 2.0**-100
_LARGEST_CODE = {"int8": 127, "int4": 7}


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Each row of D values rotated in fp32, in pieces of the largest power of two that divides D. Its own inverse."""
    head_dim = rows.shape[-1]
    size = head_dim & -head_dim
    x = rows.to(torch.float32).reshape(*rows.shape[:-1], head_dim // size, size)
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).reshape(x.shape)
        half *= 2
    return (x * torch.tensor(size**-0.5, dtype=torch.float32)).reshape(rows.shape)


def quantise(rows: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of D values → bytes [..., D or D / 2] (uint8) and scales [..., G] (bf16), as a block holds them."""
    values = hadamard(rows) if precision == "int4" else rows.to(torch.float32)
    head_dim = values.shape[-1]
    codes, scales = [], []
    for start, end in _groups(head_dim, precision):
        code, scale = _quantise_group(values[..., start:end], _LARGEST_CODE[precision])
        codes.append(_pack(code) if precision == "int4" else code.to(torch.int8).view(torch.uint8))
        scales.append(scale)
    return torch.cat(codes, dim=-1), torch.stack(scales, dim=-1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, head_dim: int, precision: Precision) -> torch.Tensor:
    """The values in fp32 that bytes and scales of `quantise` stand for."""
    parts, start_byte = [], 0
    for index, (start, end) in enumerate(_groups(head_dim, precision)):
        num_bytes = (end - start) // (2 if precision == "int4" else 1)
        part = codes[..., start_byte : start_byte + num_bytes]
        code = _unpack(part) if precision == "int4" else part.contiguous().view(torch.int8)
        parts.append(code.to(torch.float32) * scales[..., index, None].to(torch.float32))
        start_byte += num_bytes
    values = torch.cat(parts, dim=-1)
    return hadamard(values) if precision == "int4" else values


def _groups(head_dim: int, precision: Precision) -> list[tuple[int, int]]:
    size = head_dim if precision == "int8" else INT4_GROUP
    return [(start, min(start + size, head_dim)) for start in range(0, head_dim, size)]


def _quantise_group(values: torch.Tensor, largest_code: int) -> tuple[torch.Tensor, torch.Tensor]:
    largest = values.abs().amax(dim=-1)
    is_finite = torch.isfinite(values).all(dim=-1)
    exact = torch.where(is_finite & (largest >= _SMALLEST), largest / largest_code, torch.zeros_like(largest))
    bits = (exact.contiguous().view(torch.int32) + 0xFFFF) >> 16 << 16
    scale = bits.view(torch.float32)
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    finite = torch.where(is_finite[..., None], values, torch.zeros_like(values))
    codes = torch.round(finite * inverse[..., None]).to(torch.int32)
    marked = torch.where(is_finite, scale, torch.full_like(scale, float("nan")))
    return codes, marked.to(torch.bfloat16)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    half = codes.shape[-1] // 2
    low, high = codes[..., :half] + 8, codes[..., half:] + 8
    return (low | high << 4).to(torch.uint8)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    wide = packed.to(torch.int32)
    return torch.cat((wide & 15, wide >> 4), dim=-1) - 8
