"""CUDA paged attention against the torch reference, and bit by bit against itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from cuda_world import World, check
from kv_world import LAYER

from remora.kernels.cuda.attention import merge_attention
from remora.kernels.cuda.attention_plan import plan_decode_graph
from remora.kernels.cuda.device import Device
from remora.kernels.cuda.place import block_major
from remora.kernels.reference import attention as reference
from remora.platform.base.errors import KernelError

_LENGTHS = [1, 37, 577]
_ROWS = [(0, 0, 1), (1, 36, 37), (2, 570, 577)]


# bf16 KV with fp32 values: the other tests.
@pytest.mark.parametrize(("precision", "values"), [("fp32", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_every_head_size_equals_the_reference(device: Device, precision: str, values: str, head_dim: int) -> None:
    world = World(_LENGTHS, precision=precision, values=values, head_dim=head_dim)
    check(world, _ROWS, world.run(device, _ROWS))


@pytest.mark.parametrize(("group", "block_tokens"), [(1, 16), (3, 256), (4, 128), (8, 64), (20, 512)])
def test_every_group_and_block_size_equals_the_reference(device: Device, group: int, block_tokens: int) -> None:
    world = World(_LENGTHS, group=group, num_kv_heads=1, block_tokens=block_tokens)
    check(world, _ROWS, world.run(device, _ROWS))
    decode = [(1, 36, 37), (2, 576, 577)]
    check(world, decode, world.run(device, decode, world.plan(decode, num_processors=8)))


def test_a_row_has_the_same_bits_in_any_company_and_behind_any_split(device: Device) -> None:
    world = World([700, 90, 513, 7], head_dim=80)
    rows = [(0, 690, 700), (1, 80, 90), (2, 512, 513), (3, 0, 7)]
    together = world.run(device, rows)
    check(world, rows, together)
    split = world.plan(rows, num_processors=100)
    assert split.num_parts > 0
    assert [r.bits() for r in world.run(device, rows, split)] == [r.bits() for r in together]
    for row, result in zip(rows, together, strict=True):
        assert world.run(device, [row])[0].bits() == result.bits()


def test_a_row_has_the_same_bits_in_tiles_of_any_height(device: Device) -> None:
    world = World([530], group=1, num_kv_heads=1)
    [whole] = world.run(device, [(0, 500, 530)])
    for num_rows in (1, 3, 7):
        plan = world.plan([(0, 530 - num_rows, 530)], num_processors=0)
        assert plan.tile_rows == {1: 2, 3: 4, 7: 8}[num_rows]
        [part] = world.run(device, [(0, 530 - num_rows, 530)], plan)
        assert part.bits() == whole.rows(30 - num_rows, 30).bits()


@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(device: Device, group: int) -> None:
    world = World([530], group=group, num_kv_heads=1)
    [whole] = world.run(device, [(0, 490, 530)])
    for first, end in itertools.pairwise([490, 491, 500, 512, 530]):
        [part] = world.run(device, [(0, first, end)])
        assert part.bits() == whole.rows(first - 490, end - 490).bits()


def test_a_group_with_common_blocks_has_the_bits_of_its_members_alone(device: Device) -> None:
    world = World([1100, 1090, 600, 530, 1060], group=4, num_kv_heads=1, num_common_blocks=33)
    rows = [(0, 1099, 1100), (1, 1088, 1090), (2, 599, 600), (3, 529, 530), (4, 1059, 1060)]
    grouped = world.plan(rows)
    assert grouped.num_groups == 1
    assert world.plan(rows, group_prefixes=False).num_groups == 0
    results = world.run(device, rows, grouped)
    check(world, rows, results)
    alone = world.run(device, rows, world.plan(rows, group_prefixes=False))
    assert [r.bits() for r in results] == [r.bits() for r in alone]


def test_the_plan_of_a_graph_serves_any_positions_with_the_same_bits(device: Device) -> None:
    world = World([1100, 513, 3], group=3)
    rows = [(0, 1099, 1100), (1, 512, 513), (2, 2, 3)]
    plan = plan_decode_graph(num_sequences=3, max_context_len=1600, group=3)
    assert [r.bits() for r in world.run(device, rows, plan)] == [r.bits() for r in world.run(device, rows)]
    wide = World([600], group=20, num_kv_heads=1)
    plan = plan_decode_graph(num_sequences=1, max_context_len=600, group=20)
    assert wide.run(device, [(0, 599, 600)], plan)[0].bits() == wide.run(device, [(0, 599, 600)])[0].bits()


def test_layer_major_memory_gives_the_same_bits(device: Device) -> None:
    world = World([200, 45])
    rows = [(0, 199, 200), (1, 40, 45)]
    by_layer = world.run(device, rows, by_layer=True)
    assert [r.bits() for r in by_layer] == [r.bits() for r in world.run(device, rows)]


def test_scores_of_thousands_neither_overflow_nor_vanish(device: Device) -> None:
    world = World([700], precision="fp32", query_scale=1000.0)
    [result] = world.run(device, [(0, 695, 700)])
    out, lse = world.expected(0, 695, 700)
    assert np.abs(result.out_TQD - out).max() < 1e-2
    assert np.abs(result.lse_TQ / lse - 1).max() < 1e-5


def test_bytes_beyond_what_a_row_sees_change_nothing(device: Device) -> None:
    world = World([45, 530])
    rows = [(0, 40, 45), (1, 520, 525)]
    before = world.run(device, rows)
    assert all(np.isfinite(result.out_TQD).all() for result in before)
    world.kv[int(world.blocks[0][-1]), :, :, :, 45 % 32 :] = 3.0e38
    world.kv[int(world.blocks[1][-1]), :, :, :, 525 % 32 :] = float("inf")
    world.kv[:, 1 - LAYER] = float("nan")
    assert [r.bits() for r in world.run(device, rows)] == [r.bits() for r in before]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
def test_a_bad_value_marks_the_rows_that_see_it_and_no_other(device: Device, bad: float, side: int) -> None:
    world = World([100, 600])
    rows = [(0, 90, 100), (1, 590, 600)]
    clean = world.run(device, rows)
    world.kv[int(world.blocks[1][595 // 32]), LAYER, side, 0, 595 % 32, 5] = bad
    dirty = world.run(device, rows)
    assert dirty[0].bits() == clean[0].bits()
    marked = ~np.isfinite(dirty[1].out_TQD[:, :3]).all(axis=-1)
    # An infinite K gives a score of plus or minus infinity by the sign of the query; the latter has weight 0.
    reads = world.queries[1][590:600, :3, 5] > 0 if side == 0 and bad == float("inf") else np.full((10, 3), True)
    sees = (np.arange(590, 600) >= 595)[:, None]
    assert (marked == (reads & sees)).all()
    assert dirty[1].rows(0, 5).bits() == clean[1].rows(0, 5).bits()
    assert dirty[1].out_TQD[:, 3:].tobytes() == clean[1].out_TQD[:, 3:].tobytes()


@pytest.mark.parametrize("head_dim", [64, 80])
def test_merging_halves_equals_the_reference(device: Device, head_dim: int) -> None:
    torch.manual_seed(5)
    out_a, out_b = torch.randn(2, 4, 6, head_dim)
    lse_a, lse_b = torch.randn(2, 4, 6) * 5
    lse_a[0], lse_b[1], lse_a[2, 3], lse_b[2, 3] = [float("-inf")] * 4
    expected_out, expected_lse = reference.merge_attention(out_a, lse_a, out_b, lse_b)
    uploaded = [device.upload(x.numpy()) for x in (out_a, lse_a, out_b, lse_b)]
    merge_attention(
        device,
        **dict(zip(("out_a", "lse_a", "out_b", "lse_b"), uploaded, strict=True)),
        out_TQD=uploaded[0],
        lse_TQ=uploaded[1],
    )
    assert np.allclose(device.download(uploaded[0]), expected_out.numpy(), atol=1e-6)
    assert np.allclose(device.download(uploaded[1]), expected_lse.numpy(), atol=1e-5)


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_outside_the_arena_is_refused(device: Device, block: int) -> None:
    world = World([40])
    world.blocks[0][1] = block
    with pytest.raises(KernelError, match=f"block {block} lies outside an arena of 5"):
        world.run(device, [(0, 39, 40)])


def test_shapes_that_are_not_served_are_refused_by_name(device: Device) -> None:
    for sizes, message in [({"head_dim": 24}, "head_dim 24"), ({"block_tokens": 48}, "block_tokens 48")]:
        with pytest.raises(KernelError, match=message):
            World([40], **sizes).run(device, [(0, 39, 40)])  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="layer 2 of 2"):
        block_major(World([40]).layout, 2)
