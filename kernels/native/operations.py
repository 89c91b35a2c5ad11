"""Single native operations on numpy arrays: for the sampler and for tests against torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from remora.kernels.base import WEIGHT_PIECE, WeightPrecision
from remora.kernels.native.library import DTYPES, load_library
from remora.platform.base.errors import KernelError

Float32 = NDArray[np.float32]


def _contiguous(array: Float32, name: str, ndim: int) -> Float32:
    if array.dtype != np.float32 or array.ndim != ndim:
        raise KernelError(f"{name} must be fp32 with {ndim} axes, not {array.dtype} with {array.ndim}")
    return np.ascontiguousarray(array)


def argmax_rows(logits_RV: Float32, *, level: str | None = None) -> tuple[NDArray[np.int32], Float32]:
    """First index of each row's maximum, and the maximum; the index of a row with a NaN is -1."""
    index, maximum, _ = _argmax(logits_RV, level, with_log_sum_exp=False)
    return index, maximum


def log_sum_exp_rows(logits_RV: Float32, *, level: str | None = None) -> Float32:
    """log Σ exp of each row, so that log-probabilities are logits minus it; NaN for a row with a NaN."""
    _, _, log_sum_exp = _argmax(logits_RV, level, with_log_sum_exp=True)
    return log_sum_exp


def weigh_row(
    logits_V: Float32,
    largest: float,
    factor: float,
    weights_V: Float32,
    piece_sums_P: Float32,
    *,
    level: str | None = None,
) -> None:
    """weights = exp((logits - largest) * factor), and the sum of every WEIGHT_PIECE of them (the last one shorter).

    All arrays are contiguous fp32. Raises KernelError when they do not fit.
    """
    num_pieces = -(-len(logits_V) // WEIGHT_PIECE)
    if weights_V.shape != logits_V.shape or piece_sums_P.shape != (num_pieces,):
        raise KernelError(f"{weights_V.shape} and {piece_sums_P.shape} do not fit {len(logits_V)} logits")
    for array in (logits_V, weights_V, piece_sums_P):
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise KernelError("logits, weights and sums must be contiguous fp32")
    library = load_library()
    library.check(
        library.functions.remora_weigh_row(
            library.level_number(level),
            logits_V.ctypes.data,
            len(logits_V),
            largest,
            factor,
            weights_V.ctypes.data,
            piece_sums_P.ctypes.data,
        )
    )


def _argmax(
    logits_RV: Float32, level: str | None, *, with_log_sum_exp: bool
) -> tuple[NDArray[np.int32], Float32, Float32]:
    logits = _contiguous(logits_RV, "logits", 2)
    num_rows, num_columns = logits.shape
    if num_columns == 0:
        raise KernelError("rows without values have no maximum")
    index = np.empty(num_rows, np.int32)
    maximum, log_sum_exp = np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)
    library = load_library()
    library.check(
        library.functions.remora_argmax_rows(
            library.level_number(level),
            logits.ctypes.data,
            num_rows,
            num_columns,
            index.ctypes.data,
            maximum.ctypes.data,
            log_sum_exp.ctypes.data if with_log_sum_exp else None,
        )
    )
    return index, maximum, log_sum_exp


def linear(
    x_TI: Float32,
    weights_OI: Float32,
    bias_O: Float32 | None = None,
    *,
    precision: WeightPrecision,
    silu: bool = False,
    level: str | None = None,
    num_threads: int = 1,
) -> Float32:
    """x · weightsᵀ + bias with weights in `precision`, quantised by kernels.grouped where it is int8 or int4.

    With `silu`, rows of weights are [gate; up] and the result is SiLU(gate) * up, of half the width. Packs on every
    call: not for production."""
    x, weights = _contiguous(x_TI, "x", 2), _contiguous(weights_OI, "weights", 2)
    num_out, num_in = weights.shape
    if x.shape[1] != num_in or (bias_O is not None and bias_O.shape != (num_out,)) or (silu and num_out % 2):
        raise KernelError(f"x {x.shape} and bias do not fit weights {weights.shape}")
    bias = None if bias_O is None else _contiguous(bias_O, "bias", 1)
    out = np.empty((len(x), num_out // 2 if silu else num_out), np.float32)
    codes, scale, minimum = weights, None, None
    if precision in ("int8", "int4"):
        # Here, so that samplers do without torch.
        import torch

        from remora.kernels.grouped import group_rows

        grouped = group_rows(torch.from_numpy(weights), precision)
        codes, scale = grouped.codes_OI.numpy(), grouped.scale_OG.contiguous().numpy()
        minimum = None if grouped.minimum_OG is None else grouped.minimum_OG.contiguous().numpy()
    library = load_library()
    library.check(
        library.functions.remora_linear(
            library.level_number(level),
            num_threads,
            x.ctypes.data,
            len(x),
            codes.ctypes.data,
            None if scale is None else scale.ctypes.data,
            None if minimum is None else minimum.ctypes.data,
            DTYPES[precision],
            num_out,
            num_in,
            None if bias is None else bias.ctypes.data,
            int(silu),
            out.ctypes.data,
        )
    )
    return out


def rms_norm(x_TI: Float32, weight_I: Float32, eps: float, *, level: str | None = None) -> Float32:
    """x / sqrt(mean(x²) + eps) * weight for each row."""
    x, weight = _contiguous(x_TI, "x", 2), _contiguous(weight_I, "weight", 1)
    if weight.shape != x.shape[1:]:
        raise KernelError(f"weight {weight.shape} does not fit x {x.shape}")
    out = np.empty_like(x)
    library = load_library()
    library.check(
        library.functions.remora_rms_norm(
            library.level_number(level), x.ctypes.data, weight.ctypes.data, *x.shape, eps, out.ctypes.data
        )
    )
    return out


def rope(heads_TD: Float32, cos_TD2: Float32, sin_TD2: Float32, *, level: str | None = None) -> Float32:
    """Each row rotated by its angles, as Hugging Face does; cos and sin have half the width."""
    heads = _contiguous(heads_TD, "heads", 2).copy()
    cos, sin = _contiguous(cos_TD2, "cos", 2), _contiguous(sin_TD2, "sin", 2)
    if cos.shape != (len(heads), heads.shape[1] // 2) or sin.shape != cos.shape or heads.shape[1] % 2:
        raise KernelError(f"cos {cos.shape} and sin {sin.shape} do not fit heads {heads.shape}")
    library = load_library()
    library.check(
        library.functions.remora_rope(
            library.level_number(level), heads.ctypes.data, cos.ctypes.data, sin.ctypes.data, *heads.shape
        )
    )
    return heads
