"""Native K/V storage and paged attention against the torch reference, and bit by bit against themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kv_world import LAYER
from paged_world import World, check_against_reference, same_bits

from remora.kernels.batch import StepBatch
from remora.kernels.layout import K_SIDE, V_SIDE
from remora.kernels.native.attention import AttentionResult, paged_attention, store_kv
from remora.kernels.reference.kv_view import KVView
from remora.platform.base.errors import KernelError

PLAIN = ["fp32", "bf16"]
#: Of K and V alike, or K/V.
PRECISIONS = [*PLAIN, "int8", "int4", "int8/int4", "int5/int4"]

_LENGTHS = [1, 37, 200, 1111]
_ROWS = [(0, 0, 1), (1, 36, 37), (2, 151, 200), (3, 1080, 1111)]


@pytest.mark.parametrize(
    ("precision", "head_dim"),
    [
        *itertools.product(PLAIN, [16, 64, 80, 96, 128]),
        *[("int8", 16), ("int8", 96), ("int4", 64), ("int4", 80), ("int8/int4", 128), ("bf16/int8", 64)],
        *[("int5", 16), ("int5", 96), ("int5/int4", 64)],
    ],
)
def test_every_head_size_equals_the_reference(level: str, precision: str, head_dim: int) -> None:
    check_against_reference(World(_LENGTHS, precision=precision, head_dim=head_dim), _ROWS, level)


@pytest.mark.parametrize(
    ("precision", "group", "block_tokens"),
    [
        *((precision, *sizes) for precision in PLAIN for sizes in [(1, 16), (4, 128), (8, 64), (5, 32)]),
        *[("int8", 1, 16), ("int8", 8, 64), ("int4", 5, 32), ("int5/int4", 4, 128)],
    ],
)
def test_every_group_and_block_size_equals_the_reference(
    level: str, precision: str, group: int, block_tokens: int
) -> None:
    world = World(_LENGTHS, precision=precision, group=group, num_kv_heads=1, block_tokens=block_tokens)
    check_against_reference(world, _ROWS, level)


def test_scores_of_thousands_neither_overflow_nor_vanish(level: str) -> None:
    world = World([700], precision="fp32", query_scale=1000.0)
    [result] = world.run([(0, 690, 700)], level=level)
    out, lse = world.expected(0, 690, 700, rounded_queries=False)
    assert np.abs(result.out_TQD - out).max() < 1e-2
    assert np.abs(result.lse_TQ / lse - 1).max() < 1e-5


@pytest.mark.parametrize(
    ("precision", "head_dim"), [*itertools.product(PLAIN, [64, 80]), ("int8", 80), ("int4", 80), ("bf16/int8", 64)]
)
def test_a_row_has_the_same_bits_in_any_company(level: str, precision: str, head_dim: int) -> None:
    world = World([1200, 90, 513, 7], precision=precision, head_dim=head_dim)
    whole = [(0, 1100, 1200), (1, 0, 90), (2, 512, 513), (3, 0, 7)]
    together = world.run(whole, level=level, num_threads=2)
    for rows, result in zip(whole, together, strict=True):
        [alone] = world.run([rows], level=level, num_threads=1)
        assert same_bits(alone, result)
    for num_threads in (1, 3, 8):
        again = world.run(whole, level=level, num_threads=num_threads)
        assert all(same_bits(a, b) for a, b in zip(again, together, strict=True))


@pytest.mark.parametrize(
    ("precision", "group"), [*itertools.product(PLAIN, [1, 3, 8]), ("int8", 1), ("int8", 8), ("int4", 3), ("int4", 8)]
)
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(level: str, precision: str, group: int) -> None:
    world = World([1030], precision=precision, group=group, num_kv_heads=1)
    [whole] = world.run([(0, 480, 1030)], level=level)
    for cuts in ([480, 481, 500, 512, 1024, 1030], [480, 513, 1030]):
        for first, end in itertools.pairwise(cuts):
            [part] = world.run([(0, first, end)], level=level)
            rows = slice(first - 480, end - 480)
            assert same_bits(part, AttentionResult(out_TQD=whole.out_TQD[rows], lse_TQ=whole.lse_TQ[rows]))


def test_a_long_sequence_split_between_threads_has_the_bits_of_one_that_is_not(level: str) -> None:
    world = World([2000, 40], precision="bf16")
    [alone] = world.run([(0, 1999, 2000)], level=level, num_threads=4)
    crowd = world.run([(0, 1999, 2000)] + [(1, 39, 40)] * 400, level=level, num_threads=1)
    assert same_bits(alone, crowd[0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_beyond_the_context_change_nothing(level: str, precision: str) -> None:
    world = World([45, 530], precision=precision)
    rows = [(0, 40, 45), (1, 529, 530)]
    before = world.run(rows, level=level)
    assert all(np.isfinite(result.out_TQD).all() for result in before)
    for stale, side in itertools.product((0xFF, 0x7F), (K_SIDE, V_SIDE)):  # NaN, and large values
        for bytes_of in (world.layout.rows_view, world.layout.scales_view):
            view = bytes_of(world.data, side)
            view[:, 1 - LAYER] = stale * (0x101 if view.dtype == np.uint16 else 1)
            for length, blocks in zip(world.lengths, world.blocks, strict=True):
                view[int(blocks[-1]), :, :, length % 32 :] = stale * (0x101 if view.dtype == np.uint16 else 1)
        after = world.run(rows, level=level)
        assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("precision", PLAIN)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
def test_a_bad_value_marks_its_own_rows_and_no_other_sequence(
    level: str, precision: str, bad: float, side: int
) -> None:
    world = World([100, 600, 64], precision=precision)
    rows = [(0, 90, 100), (1, 595, 600), (2, 63, 64)]
    clean = world.run(rows, level=level)
    block, slot = int(world.blocks[1][520 // 32]), 520 % 32
    world.kv[block, LAYER, side, 0, slot, 5] = bad
    dirty = world.run(rows, level=level)
    assert same_bits(clean[0], dirty[0])
    assert same_bits(clean[2], dirty[2])
    marked = ~np.isfinite(dirty[1].out_TQD[:, :3]).all(axis=-1)
    # An infinite K gives a score of plus or minus infinity by the sign of the query; the latter has weight 0.
    reads = world.queries[1][595:600, :3, 5] > 0 if side == 0 and bad == float("inf") else True
    assert (marked == reads).all()
    assert dirty[1].out_TQD[:, 3:].tobytes() == clean[1].out_TQD[:, 3:].tobytes()


@pytest.mark.parametrize("precision", ["int8", "int5/int4"])
@pytest.mark.parametrize(("bad", "side"), [(float("nan"), K_SIDE), (float("inf"), V_SIDE)], ids=["k", "v"])
def test_a_bad_value_marks_its_quantised_row_and_no_other_sequence(
    level: str, precision: str, bad: float, side: int
) -> None:
    world = World([100, 600, 64], precision=precision)
    rows = [(0, 90, 100), (1, 595, 600), (2, 63, 64)]
    clean = world.run(rows, level=level)
    values = torch.ones(1, 2, 64)
    values[0, 0, 5] = bad
    block, slot = torch.from_numpy(world.blocks[1][520 // 32 :][:1]).long(), torch.tensor([520 % 32])
    kept = world.view.read(side, LAYER, block)[0, 1:, slot]
    world.view.write(side, LAYER, block, slot, torch.cat((values[:, :1], kept.transpose(0, 1)), dim=1))
    dirty = world.run(rows, level=level)
    assert same_bits(clean[0], dirty[0])
    assert same_bits(clean[2], dirty[2])
    assert not np.isfinite(dirty[1].out_TQD[:, :3]).all(axis=-1).any()
    assert np.isfinite(dirty[1].out_TQD[:, 3:]).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_store_writes_the_slots_of_the_step_and_no_other_byte(level: str, precision: str, num_threads: int) -> None:
    world = World([70, 33], precision=precision, head_dim=80)
    expected = world.data.copy()
    view = KVView(world.layout, expected)
    batch = StepBatch(max_tokens=64, max_sequences=2, max_blocks=3)
    spans = [(0, 20, 70), (1, 32, 33)]
    for index, first, end in spans:
        batch.add([0] * (end - first), first_position=first, blocks=world.blocks[index])
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, batch.num_tokens, 2, 80), dtype=np.float32) * 1e3
    v[4, 0, 1], k[7], v[9, 1] = -0.0, 0.0, 1e-38
    row = 0
    for index, first, end in spans:
        position = torch.arange(first, end)
        blocks = torch.from_numpy(world.blocks[index]).long()[position // 32]
        for side, values in enumerate((k, v)):
            view.write(side, LAYER, blocks, position % 32, torch.from_numpy(values[row : row + end - first]))
        row += end - first
    store_kv(batch, world, k, v, layer=LAYER, level=level, num_threads=num_threads)
    assert not batch.not_finite_S.any()
    assert (world.data == expected).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("bad", "side"), [(float("nan"), K_SIDE), (float("-inf"), V_SIDE)], ids=["k", "v"])
def test_store_names_the_sequences_whose_values_are_not_finite(
    level: str, precision: str, bad: float, side: int
) -> None:
    world = World([70, 33, 40], precision=precision, head_dim=80)
    batch = StepBatch(max_tokens=64, max_sequences=3, max_blocks=3)
    for index, first, end in [(0, 20, 70), (1, 32, 33), (2, 39, 40)]:
        batch.add([0] * (end - first), first_position=first, blocks=world.blocks[index])
    kv = np.random.default_rng(5).standard_normal((2, batch.num_tokens, 2, 80), dtype=np.float32)
    kv[side, 50, 1, 79] = bad
    store_kv(batch, world, kv[0], kv[1], layer=LAYER, level=level, num_threads=3)
    assert batch.not_finite_S.tolist() == [0, 1, 0]
    stored = world.view.read(side, LAYER, torch.tensor([int(world.blocks[1][1])]))[0, 1, 0]
    assert not torch.isfinite(stored).all()


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_outside_the_arena_is_refused(level: str, block: int) -> None:
    world = World([40])
    before = world.data.copy()
    batch = StepBatch(max_tokens=1, max_sequences=1, max_blocks=2)
    batch.add([0], first_position=39, blocks=[1, block])
    rows = np.zeros((1, 2, 64), np.float32)
    with pytest.raises(KernelError, match=f"block {block} lies outside an arena of 5"):
        store_kv(batch, world, rows, rows, layer=0, level=level)
    with pytest.raises(KernelError, match=f"block {block} lies outside an arena of 5"):
        paged_attention(batch, world, np.zeros((1, 6, 64), np.float32), layer=0, scale=1.0, level=level)
    assert (world.data == before).all()


def test_shapes_that_are_not_served_are_refused_by_name(level: str) -> None:
    for sizes, message in [({"head_dim": 24}, "head_dim 24"), ({"block_tokens": 48}, "block_tokens 48")]:
        with pytest.raises(KernelError, match=message):
            World([40], **sizes).run([(0, 39, 40)], level=level)  # type: ignore[arg-type]
    batch = StepBatch(max_tokens=1, max_sequences=1, max_blocks=2)
    world = World([40])
    batch.add([0], first_position=39, blocks=world.blocks[0])
    with pytest.raises(KernelError, match="do not fit 2 kv heads"):
        paged_attention(batch, world, np.zeros((1, 3, 64), np.float32), layer=0, scale=1.0, level=level)
    with pytest.raises(KernelError, match="layers 2 to 2 of 2"):
        paged_attention(batch, world, np.zeros((1, 6, 64), np.float32), layer=2, scale=1.0, level=level)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_common_prefix_attended_once_leaves_the_bits_of_each_sequence(level: str, precision: str) -> None:
    lengths = [1030, 1100, 1560, 70, 1090, 520]
    world = World(lengths, precision=precision, head_dim=64)
    for index, columns in [(1, 32), (2, 32), (4, 16), (5, 16)]:  # two, two, one and one chunks of 512 in common with 0
        world.blocks[index][:columns] = world.blocks[0][:columns]
    rows = [(0, 1029, 1030), (3, 69, 70), (1, 1060, 1100), (4, 1088, 1090), (2, 1559, 1560), (5, 513, 520)]
    alone = [world.run([row], level=level, num_threads=1)[0] for row in rows]
    for num_threads in (1, 3):
        together = world.run(rows, level=level, num_threads=num_threads)
        assert all(same_bits(a, b) for a, b in zip(alone, together, strict=True))
