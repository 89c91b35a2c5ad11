"""Each other CUDA operation against the torch reference."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from kv_world import LAYER
from numpy.typing import NDArray
from store_step import (
    BLOCK_T,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_TOKENS,
    SLOT_T,
    ints,
    inverse_frequencies,
    normed_and_rotated,
    store,
    to_device,
)

from remora.kernels.cuda import operations
from remora.kernels.cuda.device import Device
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reference.k_shift import shift_k
from remora.kernels.reference.norm import rms_norm
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision
from remora.platform.base.errors import KernelError


def make_arena(
    num_blocks: int = 6,
    *,
    precision: Precision = "bf16",
    head_dim: int = 64,
    num_layers: int = 2,
    num_kv_heads: int = 2,
) -> tuple[BlockLayout, NDArray[np.uint8]]:
    group = LayerGroup(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        k_precision=precision,
        v_precision=precision,
    )
    layout = BlockLayout(KVGeometry(groups=(group,), block_tokens=16))
    data = np.random.default_rng(3).integers(0, 255, num_blocks * layout.block_bytes, np.uint8)
    view = layout.torch_view(data)
    torch.manual_seed(3)
    view.copy_(torch.randn(view.shape))
    return layout, data


def from_device(device: Device, array: object, like: torch.Tensor) -> torch.Tensor:
    host = torch.from_numpy(device.download(array))
    return host.view(torch.bfloat16) if like.dtype == torch.bfloat16 else host


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("precision", "values"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_store_norms_rotates_and_writes_its_slots_and_no_other_byte(
    device: Device, head_dim: int, precision: Precision, values: str, with_norm: bool
) -> None:
    layout, data = make_arena(precision=precision, head_dim=head_dim)
    qkv = torch.randn(NUM_TOKENS, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim) * 3
    qkv[1, NUM_HEADS + 2, 3], qkv[2, NUM_HEADS + 3, 4] = float("nan"), float("inf")
    qkv = qkv.to(torch.bfloat16 if values == "bf16" else torch.float32)
    norms = torch.rand(2, head_dim) + 0.5 if with_norm else None
    q, k, v = normed_and_rotated(qkv, norms)

    arena = device.upload(data)
    q_out, marks = store(device, qkv, norms, data=arena, layout=layout)
    stored_bytes = device.download(arena).copy()
    stored, before = layout.torch_view(stored_bytes), layout.torch_view(data)
    rows = (torch.from_numpy(BLOCK_T).long(), LAYER, slice(None), slice(None), torch.from_numpy(SLOT_T).long())
    # Angles of large positions differ in the last bits of sine and cosine: compared by distance, not by bits.
    tolerance = 1e-5 if stored.dtype == torch.float32 else 2.0**-7
    kept = stored[rows]
    assert torch.allclose(kept[:, K_SIDE].float(), k, rtol=tolerance, atol=4e-5)
    assert torch.equal(kept[:, V_SIDE].nan_to_num(7.0), v.to(stored.dtype).nan_to_num(7.0))
    q_tolerance = 1e-5 if values == "fp32" else 2.0**-7
    assert torch.allclose(from_device(device, q_out, qkv).float(), q.to(qkv.dtype).float(), rtol=q_tolerance, atol=4e-5)
    assert marks == [0, 1, 1, 0, 0]
    stored[rows] = before[rows]
    assert (stored_bytes == data).all()


@pytest.mark.parametrize(("precision", "head_dim"), [("fp32", 64), ("bf16", 80), ("bf16", 96), ("fp32", 128)])
def test_k_shift_rotates_the_spans_and_nothing_else(device: Device, precision: Precision, head_dim: int) -> None:
    layout, data = make_arena(precision=precision, head_dim=head_dim)
    inv_freq = inverse_frequencies(head_dim)
    spans = np.array([[3, 5, 12, -25], [0, 0, 16, 900], [1, 15, 16, 1]], np.int32)
    arena = device.upload(data)
    operations.shift_k(device, spans=spans, inv_freq=device.upload(inv_freq.numpy()), data=arena, layout=layout)
    expected = layout.torch_view(data)
    for block, first, end, delta in spans.tolist():
        shift_k(expected, block=block, first_slot=first, end_slot=end, delta=delta, inv_freq=inv_freq)
    shifted = layout.torch_view(device.download(arena).copy())
    assert torch.allclose(shifted.float(), expected.float(), rtol=2.0**-7 if precision == "bf16" else 1e-5, atol=1e-5)
    untouched = torch.ones(expected.shape, dtype=torch.bool)
    for block, first, end, _ in spans.tolist():
        untouched[block, :, K_SIDE, :, first:end] = False
    assert torch.equal(shifted[untouched], expected[untouched])
    for bad, message in [
        ([[6, 0, 1, 1]], "block 6"),
        ([[0, 0, 17, 1]], "outside a block"),
        ([[0, -1, 1, 1]], "outside"),
    ]:
        with pytest.raises(KernelError, match=message):
            operations.shift_k(device, spans=np.array(bad, np.int32), inv_freq=None, data=arena, layout=layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 576, 1001])
def test_norm_equals_the_reference_and_adds_the_residual(device: Device, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(7)
    x, weight, residual = (torch.randn(5, size) * 9).to(dtype), torch.randn(size), torch.randn(5, size)
    bound = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    for addend in (None, residual):
        x_device, out = to_device(device, x), to_device(device, torch.zeros_like(x))
        sums = None if addend is None else device.upload(addend.numpy())
        weight_device = device.upload(weight.numpy())
        operations.rms_norm(device, x_TI=x_device, weight_I=weight_device, eps=1e-5, out_TI=out, residual_TI=sums)
        total = x.float() if addend is None else x.float() + addend
        assert torch.allclose(from_device(device, out, x).float(), rms_norm(total, weight, 1e-5), rtol=bound, atol=1e-6)
        if sums is not None:
            assert torch.equal(torch.from_numpy(device.download(sums)), total)


def test_a_row_is_normed_to_the_same_bits_in_any_company(device: Device) -> None:
    x, weight = torch.randn(4, 577), device.upload(np.ones(577, np.float32))

    def norm(rows: torch.Tensor) -> torch.Tensor:
        out = device.empty(tuple(rows.shape), np.float32)
        operations.rms_norm(device, x_TI=to_device(device, rows), weight_I=weight, eps=1e-5, out_TI=out)
        return torch.from_numpy(device.download(out))

    assert torch.equal(norm(x)[2], norm(x[2:3].contiguous())[0])


def test_blocks_are_copied_as_if_all_were_read_first(device: Device) -> None:
    layout, data = make_arena()
    arena = device.upload(data)
    before = data.reshape(6, -1)
    operations.copy_blocks(device, layout, arena, ints(0, 1, 2), ints(1, 0, 5))
    expected = before.copy()
    expected[[1, 0, 5]] = before[[0, 1, 2]]
    assert (device.download(arena).reshape(6, -1) == expected).all()
    operations.copy_blocks(device, layout, arena, ints(5, 5), ints(3, 4))
    expected[[3, 4]] = expected[5]
    assert (device.download(arena).reshape(6, -1) == expected).all()


def test_gathered_blocks_are_scattered_elsewhere(device: Device) -> None:
    layout, data = make_arena(head_dim=128, num_layers=5)
    assert layout.block_bytes > 64 * 1024  # several pieces
    arena, other = device.upload(data), device.upload(np.zeros_like(data))
    staging = operations.gather_blocks(device, layout, arena, ints(4, 0, 4))
    assert (device.download(staging) == data.reshape(6, -1)[[4, 0, 4]]).all()
    operations.scatter_blocks(device, layout, staging, other, ints(1, 5, 2))
    expected = np.zeros_like(data).reshape(6, -1)
    expected[[1, 5, 2]] = data.reshape(6, -1)[[4, 0, 4]]
    assert (device.download(other).reshape(6, -1) == expected).all()


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (ints(0, 6), ints(1, 2), "block 6"),
        (ints(0, 1), ints(2, -1), "block -1"),
        (ints(0, 1), ints(2), "2 source blocks for 1"),
        (ints(0, 1), ints(2, 2), "twice"),
    ],
)
def test_a_copy_that_cannot_be_done_whole_is_refused_and_changes_nothing(
    device: Device, sources: NDArray[np.int32], targets: NDArray[np.int32], message: str
) -> None:
    layout, data = make_arena()
    arena = device.upload(data)
    with pytest.raises(KernelError, match=message):
        operations.copy_blocks(device, layout, arena, sources, targets)
    assert (device.download(arena) == data).all()


@pytest.mark.parametrize("num_layers", [1, 3, 9])
def test_checksums_are_those_of_zlib(device: Device, num_layers: int) -> None:
    layout, data = make_arena(num_layers=num_layers, head_dim=80, num_kv_heads=num_layers)
    blocks = data.reshape(6, -1)
    arena = device.upload(data)
    order = [3, 0, 5, 3]
    expected = [zlib.crc32(blocks[block].tobytes()) for block in order]
    assert operations.block_checksums(device, layout, arena, order) == expected
    with pytest.raises(KernelError, match="block 6"):
        operations.block_checksums(device, layout, arena, [6])


def test_zeroing_spares_the_other_blocks(device: Device) -> None:
    layout, data = make_arena(head_dim=128, num_layers=5)
    arena = device.upload(data)
    operations.zero_blocks(device, layout, arena, ints(4, 1))
    expected = data.copy().reshape(6, -1)
    expected[[4, 1]] = 0
    assert (device.download(arena).reshape(6, -1) == expected).all()
    operations.zero_blocks(device, layout, arena, ints())
    with pytest.raises(KernelError, match="block -1"):
        operations.zero_blocks(device, layout, arena, ints(-1))
