"""Single native operations against torch, at every instruction-set level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from remora.kernels.base import WeightPrecision
from remora.kernels.grouped import group_rows
from remora.kernels.native import operations
from remora.kernels.reference.linear import InputCodes, make_linear
from remora.kernels.reference.rope import rotate
from remora.platform.base.errors import KernelError

Float32 = NDArray[np.float32]
PRECISIONS: list[WeightPrecision] = ["fp32", "bf16", "int8", "int4"]


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def expected_linear(
    x: Float32, weights: Float32, bias: Float32 | None, precision: WeightPrecision, level: str
) -> Float32:
    bias_tensor = None if bias is None else torch.from_numpy(bias)
    weight = torch.from_numpy(weights)
    if precision in ("int8", "int4") and level == "amx":
        weight, precision = group_rows(weight, precision).to_fp32(), "bf16"  # its tiles take bf16 on both sides
    codes: InputCodes = "int8" if level.startswith("avx512") else "int16"
    result: Float32 = make_linear(weight, bias_tensor, precision, codes)(torch.from_numpy(x)).numpy()
    return result


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_in", [16, 65, 576, 1000])
@pytest.mark.parametrize("num_out", [1, 33, 192])
def test_linear_equals_torch_for_odd_shapes(level: str, precision: WeightPrecision, num_in: int, num_out: int) -> None:
    weights, bias = normal(num_out, num_in, seed=1), normal(num_out, seed=2)
    for num_rows in (1, 2, 3, 5, 8, 13, 17, 32, 47):
        x = normal(num_rows, num_in, seed=num_rows)
        y = operations.linear(x, weights, bias, precision=precision, level=level, num_threads=2)
        np.testing.assert_allclose(y, expected_linear(x, weights, bias, precision, level), rtol=1e-5, atol=4e-4)


def with_outliers(x: Float32) -> Float32:
    """Rows with a value far above the others in some groups, other ones in each row; the first row has none."""
    result = x.copy()
    for row in range(1, len(x)):
        result[row, (37 * row) % x.shape[1] :: 7 * 32] *= 40
    return result


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_outliers_cost_the_other_values_of_their_group_no_accuracy(level: str, precision: WeightPrecision) -> None:
    x, weights = with_outliers(normal(21, 1000)), normal(70, 1000, seed=1)
    y = operations.linear(x, weights, precision=precision, level=level)
    # The sum of a group, added up in another order, may become the next code: 0.005 times a minimum of up to 4.
    np.testing.assert_allclose(y, expected_linear(x, weights, None, precision, level), rtol=1e-5, atol=2.5e-2)
    exact = x @ group_rows(torch.from_numpy(weights), precision).to_fp32().numpy().T
    error = np.sqrt(np.mean((y - exact) ** 2, axis=1))
    # What seven bits cost where nothing stands out; eight bits for an outlier of 40 would cost several times that.
    assert (error < 0.012 * np.sqrt(1000)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(
    level: str, precision: WeightPrecision
) -> None:
    x, weights = with_outliers(normal(150, 1100)), normal(75, 1100, seed=1)
    whole = operations.linear(x, weights, precision=precision, level=level, num_threads=1)
    for num_rows in (1, 3, 6, 11, 16, 20, 31, 64):
        for num_threads in (1, 2, 3):
            part = operations.linear(
                x[40 : 40 + num_rows], weights, precision=precision, level=level, num_threads=num_threads
            )
            assert (part.view(np.uint32) == whole[40 : 40 + num_rows].view(np.uint32)).all(), num_rows


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_beyond_what_the_cache_holds_are_computed_alike_however_few_are_left(
    level: str, precision: WeightPrecision
) -> None:
    """Wide inputs, so that a dozen rows fill the level-2 cache and the rest makes a small block of its own."""
    x, weights = with_outliers(normal(72, 4096)), normal(70, 4096, seed=1)
    alone = np.concatenate([operations.linear(row[None], weights, precision=precision, level=level) for row in x])
    for num_rows in (1, 5, 12, 13, 14, 15, 16, 17, 25, 26, 31, 33, 72):
        together = operations.linear(x[:num_rows], weights, precision=precision, level=level)
        assert (together.view(np.uint32) == alone[:num_rows].view(np.uint32)).all(), num_rows


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_units", [8, 16, 50, 64])
def test_gate_and_up_are_joined_by_silu(level: str, precision: WeightPrecision, num_units: int) -> None:
    x, weights, bias = normal(9, 96), normal(2 * num_units, 96, seed=1), normal(2 * num_units, seed=2)
    y = operations.linear(x, weights, bias, precision=precision, silu=True, level=level)
    gate, up = torch.from_numpy(expected_linear(x, weights, bias, precision, level)).chunk(2, dim=-1)
    np.testing.assert_allclose(y, (torch.nn.functional.silu(gate) * up).numpy(), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_spoils_no_other_row(level: str, precision: WeightPrecision, value: float) -> None:
    x, weights = normal(19, 200), normal(40, 200, seed=1)
    clean = operations.linear(x, weights, precision=precision, level=level)
    x[7, 11] = value
    y = operations.linear(x, weights, precision=precision, level=level)
    assert not np.isfinite(y[7]).any()
    others = np.arange(19) != 7
    assert (y[others] == clean[others]).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_of_zeros_gives_zeros(level: str, precision: WeightPrecision) -> None:
    y = operations.linear(np.zeros((3, 70), np.float32), normal(20, 70), precision=precision, level=level)
    assert (y == 0).all()


@pytest.mark.parametrize("width", [1, 7, 64, 80, 576, 1000])
def test_rms_norm_equals_torch(level: str, width: int) -> None:
    x, weight = normal(5, width), normal(width, seed=1)
    expected = torch.nn.functional.rms_norm(torch.from_numpy(x), (width,), torch.from_numpy(weight), 1e-5).numpy()
    np.testing.assert_allclose(operations.rms_norm(x, weight, 1e-5, level=level), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_rope_rotates_as_hugging_face_does(level: str, head_dim: int) -> None:
    heads, angles = normal(6, head_dim), normal(6, head_dim // 2, seed=1) * 100
    cos, sin = np.cos(angles), np.sin(angles)
    whole = (torch.from_numpy(np.concatenate((table, table), axis=1)) for table in (cos, sin))
    expected = rotate(torch.from_numpy(heads)[:, None], *whole)[:, 0].numpy()
    np.testing.assert_allclose(operations.rope(heads, cos, sin, level=level), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1, 3, 199, 49152])
def test_argmax_finds_the_first_maximum_and_the_sum_of_exponentials(level: str, width: int) -> None:
    logits = normal(4, width) * 20
    logits[1, width // 3] = logits[1, width // 2] = 100
    logits[2] = -np.inf
    logits[2, width - 1] = -5
    index, maximum = operations.argmax_rows(logits, level=level)
    assert index.tolist() == logits.argmax(axis=1).tolist()
    assert (maximum == logits.max(axis=1)).all()
    expected = torch.from_numpy(logits).double().logsumexp(dim=-1).numpy()
    np.testing.assert_allclose(operations.log_sum_exp_rows(logits, level=level), expected, rtol=2e-7, atol=2e-6)


@pytest.mark.parametrize("num_columns", [1, 15, 256, 257, 1003, 49152])
def test_weights_and_their_piecewise_sums_equal_numpys(level: str, num_columns: int) -> None:
    logits = normal(1, num_columns)[0] * 10
    logits[:: max(1, num_columns // 7)] = -np.inf
    logits[num_columns // 2] = 40.0
    weights, sums = np.empty_like(logits), np.empty(-(-num_columns // 256), np.float32)
    operations.weigh_row(logits, 40.0, 1.25, weights, sums, level=level)
    expected = np.exp((logits.astype(np.float64) - 40.0) * 1.25)
    np.testing.assert_allclose(weights, expected, rtol=3e-5, atol=1e-37)
    assert weights[num_columns // 2] == 1.0
    starts = np.arange(0, num_columns, 256)
    np.testing.assert_allclose(sums, np.add.reduceat(weights.astype(np.float64), starts), rtol=1e-5, atol=1e-37)
    with pytest.raises(KernelError, match="fit"):
        operations.weigh_row(logits, 0.0, 1.0, weights[1:], sums, level=level)
    with pytest.raises(KernelError, match="contiguous"):
        operations.weigh_row(logits.astype(np.float64), 0.0, 1.0, weights, sums, level=level)  # type: ignore[arg-type]


def test_argmax_marks_a_row_with_a_nan(level: str) -> None:
    logits = normal(3, 1003)
    logits[0, 1002] = logits[1, 5] = np.nan
    assert operations.argmax_rows(logits, level=level)[0].tolist() == [-1, -1, int(logits[2].argmax())]
    assert np.isnan(operations.log_sum_exp_rows(logits, level=level)).tolist() == [True, True, False]


def test_arrays_that_do_not_fit_are_refused(level: str) -> None:
    with pytest.raises(KernelError, match="fit"):
        operations.linear(normal(2, 5), normal(3, 4), precision="fp32", level=level)
    with pytest.raises(KernelError, match="fp32"):
        operations.argmax_rows(np.zeros((2, 2)), level=level)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="level avx9"):
        operations.argmax_rows(normal(2, 2), level="avx9")
