"""K and V as int8, int5 and int4: what a row of head_dim values becomes in a block, and what it stands for.

int8: symmetric, one scale a row, values -127..127. int4: the row is first rotated by a Hadamard matrix, which spreads a
few large values over all of them, then each INT4_GROUP values are codes -8..7 with a scale of their own, negative where
the value farthest from zero is positive: that one becomes -8. Value i of a group is the low half of byte i, value
i + size / 2 the high half, both plus 8. int5: the same with -16..15, plus 16; the halves hold the lower four bits, and
behind those of the row bit i % 8 of byte i / 8 is the fifth of value i, in whole words of 64. Scales are bf16, rounded
away from zero, so that no value exceeds the range. A group with a NaN or an infinity gets the scale NaN: whatever reads
it is marked.

The operations and their order are those of the native kernels, bit by bit. Shapes: D head_dim, G scales a row.
"""

from __future__ import annotations

import torch

from remora.namespaces.geometry import INT4_GROUP, Precision

#: Groups whose largest value is smaller become zeros: the reciprocal of their scale would overflow.
_SMALLEST = 2.0**-100
_LARGEST_INT8 = 127
#: Of integers that are rotated first: their most negative code; it is added to codes, so that none is negative.
_OFFSETS = {"int5": 16, "int4": 8}


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
    """Rows of D values → bytes [..., bytes a row] (uint8) and scales [..., G] (bf16), as a block holds them."""
    offset = _OFFSETS.get(precision)
    values = rows.to(torch.float32) if offset is None else hadamard(rows)
    codes, scales = [], []
    for start, end in _groups(values.shape[-1], precision):
        code, scale = _quantise_group(values[..., start:end], offset)
        codes.append(code)
        scales.append(scale)
    if offset is None:
        data = torch.cat(codes, dim=-1).to(torch.int8).view(torch.uint8)
    else:
        shifted = [code + offset for code in codes]
        data = torch.cat([_pack_halves(code) for code in shifted], dim=-1)
        if precision == "int5":
            data = torch.cat((data, _pack_fifth_bits(torch.cat(shifted, dim=-1))), dim=-1)
    return data, torch.stack(scales, dim=-1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, head_dim: int, precision: Precision) -> torch.Tensor:
    """The values in fp32 that bytes and scales of `quantise` stand for."""
    groups = _groups(head_dim, precision)
    offset = _OFFSETS.get(precision)
    if offset is None:
        code = codes.contiguous().view(torch.int8).to(torch.int32)
    else:
        halves = [_unpack_halves(codes[..., start // 2 : end // 2]) for start, end in groups]
        code = torch.cat(halves, dim=-1) - offset
        if precision == "int5":
            code += _unpack_fifth_bits(codes[..., head_dim // 2 :])[..., :head_dim]
    parts = [
        code[..., start:end].to(torch.float32) * scales[..., index, None].to(torch.float32)
        for index, (start, end) in enumerate(groups)
    ]
    values = torch.cat(parts, dim=-1)
    return values if offset is None else hadamard(values)


def _groups(head_dim: int, precision: Precision) -> list[tuple[int, int]]:
    size = head_dim if precision == "int8" else INT4_GROUP
    return [(start, min(start + size, head_dim)) for start in range(0, head_dim, size)]


def _quantise_group(values: torch.Tensor, offset: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes -127..127, or, with an offset, -offset..offset - 1 of a scale that may be negative."""
    largest, largest_code = values.abs().amax(dim=-1), offset or _LARGEST_INT8
    is_finite = torch.isfinite(values).all(dim=-1)
    exact = torch.where(is_finite & (largest >= _SMALLEST), largest / largest_code, torch.zeros_like(largest))
    bits = (exact.contiguous().view(torch.int32) + 0xFFFF) >> 16 << 16
    scale = bits.view(torch.float32)
    if offset is not None:
        scale = torch.where((scale > 0) & (values.amax(dim=-1) == largest), -scale, scale)
    inverse = torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
    finite = torch.where(is_finite[..., None], values, torch.zeros_like(values))
    codes = torch.round(finite * inverse[..., None]).to(torch.int32)
    if offset is not None:
        codes = codes.clamp(max=offset - 1)
    marked = torch.where(is_finite, scale, torch.full_like(scale, float("nan")))
    return codes, marked.to(torch.bfloat16)


def _pack_halves(codes: torch.Tensor) -> torch.Tensor:
    """The lower four bits of a group's codes, two a byte."""
    half = codes.shape[-1] // 2
    return (codes[..., :half] & 15 | (codes[..., half:] & 15) << 4).to(torch.uint8)


def _unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    wide = packed.to(torch.int32)
    return torch.cat((wide & 15, wide >> 4), dim=-1)


def _pack_fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """Bit 4 of a row's codes, eight a byte, filled up to whole words of 64."""
    bits = torch.nn.functional.pad(codes >> 4, (0, -codes.shape[-1] % 64)).reshape(*codes.shape[:-1], -1, 8)
    return (bits << torch.arange(8, dtype=torch.int32)).sum(dim=-1).to(torch.uint8)


def _unpack_fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """16 where the fifth bit is set, else 0."""
    bits = packed.to(torch.int32)[..., None] >> torch.arange(8, dtype=torch.int32) & 1
    return bits.flatten(-2) << 4
