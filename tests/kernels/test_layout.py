"""BlockLayout: offsets, views and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.namespaces.geometry import INT4_GROUP, KVGeometry, LayerGroup, Precision
from remora.platform.base.errors import KernelError


def make_geometry(*, precision: str = "bf16", head_dim: int = 64, block_tokens: int = 32) -> KVGeometry:
    group = LayerGroup(num_layers=3, num_kv_heads=2, head_dim=head_dim, k_precision=precision, v_precision=precision)  # type: ignore[arg-type]
    return KVGeometry(groups=(group,), block_tokens=block_tokens)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [24, 64, 80])
def test_offsets_and_views_name_the_same_byte(precision: str, head_dim: int) -> None:
    layout = BlockLayout(make_geometry(precision=precision, head_dim=head_dim, block_tokens=5))
    data = np.random.default_rng(0).integers(0, 255, 7 * layout.block_bytes + 13, np.uint8)
    place = {"block": 4, "layer": 2, "side": V_SIDE, "kv_head": 1, "token": 3}
    offset = layout.offset_bytes(**place)
    row = data[offset : offset + head_dim * layout.value_bytes]
    assert layout.numpy_view(data).shape == (7, 3, 2, 2, 5, head_dim)
    assert (layout.numpy_view(data)[tuple(place.values())].view(np.uint8) == row).all()
    assert (layout.torch_view(data)[tuple(place.values())].contiguous().view(torch.uint8).numpy() == row).all()


def test_a_block_holds_all_layers_in_canonical_order_and_pads_to_block_bytes() -> None:
    layout = BlockLayout(make_geometry(head_dim=24, block_tokens=5))
    last = layout.offset_bytes(block=0, layer=2, side=V_SIDE, kv_head=1, token=4) + 24 * layout.value_bytes
    assert last == 5 * layout.geometry.groups[0].token_bytes() <= layout.block_bytes
    assert layout.offset_bytes(block=1, layer=0, side=K_SIDE) == layout.block_bytes


def test_writing_to_a_view_writes_to_the_arena() -> None:
    layout = BlockLayout(make_geometry())
    data = np.zeros(3 * layout.block_bytes, np.uint8)
    layout.torch_view(data)[1, 0, K_SIDE, 0, 0] = 1.0
    assert layout.numpy_view(data)[1, 0, K_SIDE, 0, 0, 0] == 0x3F80
    assert not layout.block_view(data, 0).any()
    assert layout.block_view(data, 1).any()


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_outside_the_arena_is_refused(block: int) -> None:
    layout = BlockLayout(make_geometry())
    data = np.zeros(4 * layout.block_bytes - 1, np.uint8)
    with pytest.raises(KernelError, match=f"block {block} lies outside an arena of 3"):
        layout.check_blocks(data, np.array([[0, 1], [block, 2]], np.int32))


@pytest.mark.parametrize("precision", ["int8", "int5", "int4"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_quantised_rows_and_scales_fill_a_block_without_gaps_or_overlaps(precision: str, head_dim: int) -> None:
    layout = BlockLayout(make_geometry(precision=precision, head_dim=head_dim, block_tokens=16))
    data = np.zeros(3 * layout.block_bytes, np.uint8)
    for side in (K_SIDE, V_SIDE):
        layout.rows_view(data, side)[1] += 1
        layout.scales_view(data, side)[1] += 0x0101
    used = 16 * layout.geometry.groups[0].token_bytes()
    assert (layout.block_view(data, 1)[:used] == 1).all()
    assert not layout.block_view(data, 1)[used:].any()
    assert not layout.block_view(data, 0).any()
    last = {"block": 1, "layer": 2, "side": V_SIDE, "kv_head": 1, "token": 15}
    rows = layout.rows_view(data, V_SIDE)
    rows[1, 2, 1, 15] = 7
    offset = layout.offset_bytes(**last)
    assert (data[offset : offset + rows.shape[-1]] == 7).all()


@pytest.mark.parametrize(
    ("k", "v", "most", "most_of_odd_sizes"),
    [("int8", "int8", 0.53, 0.53), ("int5", "int4", 0.30, 0.325), ("int4", "int4", 0.27, 0.275)],
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_quantised_kv_takes_the_promised_share_of_bf16(
    k: Precision, v: Precision, most: float, most_of_odd_sizes: float, head_dim: int
) -> None:
    plain = make_geometry(head_dim=head_dim)
    share = plain.with_precision((k, v)).groups[0].token_bytes() / plain.groups[0].token_bytes()
    # Heads that are no multiple of the group have a shorter one, and so more scales, and fifth bits that are not used.
    assert share <= (most_of_odd_sizes if head_dim % INT4_GROUP else most)


def test_views_of_plain_values_are_refused_for_quantised_and_mixed_precision() -> None:
    data = np.zeros(10_000_000, np.uint8)
    mixed = LayerGroup(num_layers=1, num_kv_heads=1, head_dim=64, k_precision="fp32", v_precision="bf16")
    for geometry, message in [
        (make_geometry(precision="int8"), "K=int8, V=int8"),
        (KVGeometry(groups=(mixed,), block_tokens=32), "K=fp32, V=bf16"),
    ]:
        with pytest.raises(KernelError, match=message):
            BlockLayout(geometry).torch_view(data)
        with pytest.raises(KernelError, match=message):
            BlockLayout(geometry).numpy_view(data)
    with pytest.raises(KernelError, match="2 layer groups"):
        BlockLayout(KVGeometry(groups=(mixed, mixed), block_tokens=32))
    for precision, head_dim in [("int4", 33), ("int5", 40)]:
        with pytest.raises(KernelError, match=f"head_dim {head_dim}"):
            BlockLayout(make_geometry(precision=precision, head_dim=head_dim))
