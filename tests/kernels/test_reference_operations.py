"""The torch reference of the small operations: each against its definition."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from remora.kernels.grouped import GroupedPrecision, group_rows, stack_rows
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reference.attention import merge_attention, paged_attention
from remora.kernels.reference.checksum import block_checksum
from remora.kernels.reference.copy_blocks import copy_blocks
from remora.kernels.reference.k_shift import shift_k
from remora.kernels.reference.linear import make_linear
from remora.kernels.reference.norm import rms_norm
from remora.kernels.reference.rope import rope_tables, rotate
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base.errors import KernelError


def make_arena(num_blocks: int = 6, *, precision: str = "fp32") -> tuple[BlockLayout, NDArray[np.uint8]]:
    group = LayerGroup(num_layers=2, num_kv_heads=2, head_dim=32, k_precision=precision, v_precision=precision)  # type: ignore[arg-type]
    layout = BlockLayout(KVGeometry(groups=(group,), block_tokens=16))
    data = np.zeros(num_blocks * layout.block_bytes, np.uint8)
    torch.manual_seed(3)
    view = layout.torch_view(data)
    view.copy_(torch.randn(view.shape))
    return layout, data


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_attention_over_two_halves_merges_to_attention_over_the_whole() -> None:
    layout, data = make_arena()
    kv = layout.torch_view(data)
    blocks = torch.tensor([4, 0, 2, 5])
    q = torch.randn(1, 6, 32)
    whole = paged_attention(kv, layer=1, q_TQD=q, blocks=blocks, context_len=61, scale=0.2)
    front = paged_attention(kv, layer=1, q_TQD=q, blocks=blocks, context_len=23, scale=0.2)
    back = paged_attention(kv, layer=1, q_TQD=q, blocks=blocks, context_len=61, scale=0.2, first_position=23)
    for merged, expected in zip(merge_attention(*front, *back), whole, strict=True):
        assert torch.allclose(merged, expected, atol=1e-5)


def test_merging_with_nothing_changes_nothing() -> None:
    out, lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    nothing = torch.zeros(3, 4, 8), torch.full((3, 4), float("-inf"))
    for merged in (merge_attention(out, lse, *nothing), merge_attention(*nothing, out, lse)):
        assert torch.allclose(merged[0], out)
        assert torch.allclose(merged[1], lse)
    assert torch.equal(merge_attention(*nothing, *nothing)[0], nothing[0])


def test_k_computed_at_one_position_and_shifted_is_k_at_the_other() -> None:
    layout, data = make_arena()
    kv = layout.torch_view(data)
    inv_freq = 10000.0 ** -(torch.arange(16) / 16.0)
    plain_BHD = torch.randn(16, 2, 32)
    positions = torch.arange(40, 56)
    kv[3, :, K_SIDE] = rotate(plain_BHD, *rope_tables(positions, inv_freq)).transpose(0, 1)
    before = kv.clone()
    shift_k(kv, block=3, first_slot=5, end_slot=12, delta=-25, inv_freq=inv_freq)
    moved = rotate(plain_BHD, *rope_tables(positions - 25, inv_freq)).transpose(0, 1)
    assert torch.allclose(kv[3, :, K_SIDE, :, 5:12], moved[:, 5:12].expand(2, -1, -1, -1), atol=1e-4)
    kv[3, :, K_SIDE, :, 5:12] = before[3, :, K_SIDE, :, 5:12]
    assert torch.equal(kv, before)


def test_blocks_are_copied_as_if_all_were_read_first() -> None:
    layout, data = make_arena()
    before = data.copy().reshape(6, -1)
    copy_blocks(layout, data, ints(0, 1, 2), ints(1, 0, 5))
    after = data.reshape(6, -1)
    assert (after[[1, 0, 5]] == before[[0, 1, 2]]).all()
    assert (after[[2, 3, 4]] == before[[2, 3, 4]]).all()


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
    sources: NDArray[np.int32], targets: NDArray[np.int32], message: str
) -> None:
    layout, data = make_arena()
    before = data.copy()
    with pytest.raises(KernelError, match=message):
        copy_blocks(layout, data, sources, targets)
    assert (data == before).all()


def test_a_checksum_sees_every_byte_of_its_block_and_none_of_the_others() -> None:
    layout, data = make_arena()
    checksum = block_checksum(layout, data, 2)
    assert checksum == zlib.crc32(data[2 * layout.block_bytes : 3 * layout.block_bytes].tobytes())
    data[2 * layout.block_bytes - 1] ^= 1
    data[3 * layout.block_bytes] ^= 1
    assert block_checksum(layout, data, 2) == checksum
    for offset in (0, layout.offset_bytes(block=0, layer=1, side=V_SIDE), layout.block_bytes - 1):
        data[2 * layout.block_bytes + offset] ^= 1
        assert block_checksum(layout, data, 2) != checksum
        data[2 * layout.block_bytes + offset] ^= 1
    with pytest.raises(KernelError, match="block 6"):
        block_checksum(layout, data, 6)


def test_rms_norm_gives_rows_of_mean_square_one_before_the_weight() -> None:
    x, weight = torch.randn(5, 64) * 9, torch.randn(64)
    expected = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    assert torch.allclose(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5)


@pytest.mark.parametrize(("precision", "bound"), [("int8", 1 / 254), ("int4", 1 / 15)])
def test_grouped_weights_are_within_half_a_step_and_zero_groups_stay_zero(
    precision: GroupedPrecision, bound: float
) -> None:
    weight = torch.randn(4, 75)
    weight[2] = 0
    grouped = group_rows(weight, precision)
    assert grouped.shape == (4, 75)
    # fp16 scales may be a little below what the largest value needs.
    assert ((grouped.to_fp32() - weight).abs() <= weight.abs().amax() * bound * 1.01 + 2e-3).all()
    assert (grouped.to_fp32()[2] == 0).all()
    stacked = stack_rows([grouped, group_rows(weight, "int8")])
    assert stacked.precision == "int8"
    assert torch.equal(stacked.to_fp32()[:4], grouped.to_fp32())


@pytest.mark.parametrize("bias", [None, torch.randn(7)])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_inputs_beside_grouped_weights_keep_fifteen_bits(
    bias: torch.Tensor | None, precision: GroupedPrecision
) -> None:
    x, weight = torch.randn(3, 40), torch.randn(7, 40)
    got = make_linear(weight, bias, precision)(x)
    exact = torch.nn.functional.linear(x.double(), group_rows(weight, precision).to_fp32().double())
    assert torch.allclose(got.double(), exact + (0 if bias is None else bias), atol=2e-3)
    assert torch.equal(make_linear(group_rows(weight, precision), bias, precision)(x), got)


def test_bf16_linear_rounds_both_sides_and_not_the_sum() -> None:
    x, weight = torch.randn(3, 40), torch.randn(7, 40)
    expected = x.bfloat16().double() @ weight.bfloat16().double().T
    assert torch.allclose(make_linear(weight, None, "bf16")(x).double(), expected, atol=1e-5)
