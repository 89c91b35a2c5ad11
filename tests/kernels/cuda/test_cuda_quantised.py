"""CUDA kernels on K and V of integers: attention against the reference, and the bytes that are stored."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from cuda_world import World, check
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
)

from remora.kernels.cuda import operations
from remora.kernels.cuda.attention_plan import plan_decode_graph
from remora.kernels.cuda.device import Device
from remora.kernels.cuda.reencode import reencode_blocks
from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.reference import reencode as reference
from remora.kernels.reference.kv_view import KVView
from remora.kernels.reference.move_slots import move_slots
from remora.kernels.reference.row_codec import decode_rows, encode_rows
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision
from remora.platform.base.errors import KernelError

HEAD_DIMS = [64, 80, 96, 128]
Pair = tuple[Precision, Precision]
_ROWS = [(0, 0, 1), (1, 36, 37), (2, 570, 577)]


class Memory:
    """A view of bytes on the device, or of its own in host memory: random values in every slot, noise as padding."""

    def __init__(self, precisions: Pair, *, head_dim: int = 80, num_blocks: int = 6, data: Any = None) -> None:
        group = LayerGroup(
            num_layers=2, num_kv_heads=2, head_dim=head_dim, k_precision=precisions[0], v_precision=precisions[1]
        )
        self.geometry = KVGeometry(groups=(group,), block_tokens=16)
        self.layout = BlockLayout(self.geometry)
        if data is not None:
            self.data = data
            return
        self.data = np.random.default_rng(3).integers(0, 255, num_blocks * self.layout.block_bytes, np.uint8)
        generator = torch.Generator().manual_seed(3)
        for block, layer, side in itertools.product(range(num_blocks), range(2), (K_SIDE, V_SIDE)):
            rows = torch.randn(16, 2, head_dim, generator=generator) * 4
            self.view.write(side, layer, torch.full((16,), block), torch.arange(16), rows)

    @property
    def view(self) -> KVView:
        return KVView(self.layout, self.data)

    def on(self, device: Device) -> Memory:
        return Memory(self.layout.precisions, head_dim=self.layout.head_dim, data=device.upload(self.data))

    def back_from(self, device: Device, other: Memory) -> Memory:
        return Memory(self.layout.precisions, head_dim=self.layout.head_dim, data=device.download(other.data).copy())


@pytest.mark.parametrize(("precision", "values"), [("int8/int4", "fp32"), ("int5/int4", "bf16")], ids=["k8v4", "k5v4"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_over_integers_equals_the_reference(
    device: Device, precision: str, values: str, head_dim: int
) -> None:
    world = World(_ROWS_LENGTHS, precision=precision, values=values, head_dim=head_dim)
    check(world, _ROWS, world.run(device, _ROWS))


_ROWS_LENGTHS = [1, 37, 577]


@pytest.mark.parametrize(
    ("precision", "group", "block_tokens"),
    [("int4", 1, 16), ("int8", 8, 64), ("bf16/int4", 20, 128), ("int8/fp32", 4, 512), ("fp32/int5", 2, 32)],
)
def test_every_group_and_mixture_equals_the_reference(
    device: Device, precision: str, group: int, block_tokens: int
) -> None:
    world = World(_ROWS_LENGTHS, precision=precision, group=group, num_kv_heads=1, block_tokens=block_tokens)
    check(world, _ROWS, world.run(device, _ROWS))


@pytest.mark.parametrize("precision", ["int8/int4", "int4/int8"])
def test_a_row_has_the_same_bits_in_any_company_split_and_cut(device: Device, precision: str) -> None:
    world = World([700, 90, 513, 7], head_dim=80, precision=precision)
    rows = [(0, 690, 700), (1, 80, 90), (2, 512, 513), (3, 0, 7)]
    together = world.run(device, rows)
    check(world, rows, together)
    split = world.plan(rows, num_processors=100)
    assert split.num_parts > 0
    assert [r.bits() for r in world.run(device, rows, split)] == [r.bits() for r in together]
    for row, result in zip(rows[:2], together[:2], strict=True):
        assert world.run(device, [row])[0].bits() == result.bits()
    for first, end in [(690, 694), (694, 700)]:
        [part] = world.run(device, [(0, first, end)])
        assert part.bits() == together[0].rows(first - 690, end - 690).bits()


@pytest.mark.parametrize("precision", ["int8/int4", "int4/int8"])
def test_a_group_with_common_blocks_and_a_graph_have_the_bits_of_rows_alone(device: Device, precision: str) -> None:
    world = World([1060, 590, 530, 600], group=5, num_kv_heads=1, num_common_blocks=33, precision=precision)
    rows = [(0, 1059, 1060), (1, 589, 590), (2, 529, 530), (3, 599, 600)]
    grouped = world.plan(rows)
    assert grouped.num_groups == 1
    results = world.run(device, rows, grouped)
    check(world, rows, results)
    alone = world.run(device, rows, world.plan(rows, group_prefixes=False))
    assert [r.bits() for r in results] == [r.bits() for r in alone]
    graph = plan_decode_graph(num_sequences=4, max_context_len=1100, group=5)
    assert [r.bits() for r in world.run(device, rows, graph)] == [r.bits() for r in alone]


@pytest.mark.parametrize("precision", ["int8/int4", "int4/int8"])
@pytest.mark.parametrize("side", [K_SIDE, V_SIDE], ids=["k", "v"])
def test_a_marked_row_marks_what_sees_it_and_nothing_else(device: Device, precision: str, side: int) -> None:
    world = World([100, 600], precision=precision, head_dim=80)
    rows = [(0, 90, 100), (1, 590, 600)]
    clean = world.run(device, rows)
    scales = world.layout.scales_view(world.data, side)
    scales[world.blocks[1][595 // 32], LAYER, 0, 595 % 32, -1] = 0x7FC0
    dirty = world.run(device, rows)
    assert dirty[0].bits() == clean[0].bits()
    assert dirty[1].rows(0, 5).bits() == clean[1].rows(0, 5).bits()
    assert (~np.isfinite(dirty[1].out_TQD[5:, :3])).any(axis=-1).all()
    assert dirty[1].out_TQD[:, 3:].tobytes() == clean[1].out_TQD[:, 3:].tobytes()


@pytest.mark.parametrize(("precisions", "values"), [(("int8", "int4"), "fp32"), (("int4", "int5"), "bf16")])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_store_quantises_its_slots_marks_sequences_and_changes_no_other_byte(
    device: Device, head_dim: int, precisions: Pair, values: str
) -> None:
    memory = Memory(precisions, head_dim=head_dim)
    qkv = (
        torch.randn(NUM_TOKENS, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, generator=torch.Generator().manual_seed(5)) * 3
    )
    qkv[1, NUM_HEADS + 1, 3], qkv[2, NUM_HEADS + 3, 4] = float("nan"), float("inf")
    qkv[3, NUM_HEADS + 2] = 0.0
    qkv[4, NUM_HEADS + 2] *= 2.0**-110  # below what a scale can hold: zeros
    qkv = qkv.to(torch.bfloat16 if values == "bf16" else torch.float32)
    norms = torch.rand(2, head_dim, generator=torch.Generator().manual_seed(6)) + 0.5
    _, k, v = normed_and_rotated(qkv, norms)

    arena = memory.on(device)
    _, marks = store(device, qkv, norms, data=arena.data, layout=memory.layout)
    assert marks == [0, 1, 1, 0, 0]
    stored = memory.back_from(device, arena)
    place = (BLOCK_T, LAYER, slice(None), SLOT_T)
    for side, rows in ((K_SIDE, k), (V_SIDE, v)):
        codes, scales = encode_rows(rows, precisions[side])
        got_codes = stored.layout.rows_view(stored.data, side)
        got_scales = stored.layout.scales_view(stored.data, side)
        if side == V_SIDE:
            assert (got_codes[place] == codes.numpy()).all()
            assert (one_nan(got_scales[place]) == one_nan(scales.view(torch.uint16).numpy())).all()
        else:  # sine, cosine and the norm differ in the last bits: a code may be the next one
            got = decode_rows(
                torch.from_numpy(got_codes[place]),
                torch.from_numpy(got_scales[place]).view(torch.bfloat16),
                head_dim,
                precisions[side],
            )
            assert_near(got, decode_rows(codes, scales, head_dim, precisions[side]), precisions[side])
        got_codes[place] = memory.layout.rows_view(memory.data, side)[place]
        got_scales[place] = memory.layout.scales_view(memory.data, side)[place]
    assert (stored.data == memory.data).all()


def one_nan(bf16: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """bf16 bits with all that are NaN alike: their sign and payload depend on who converted them."""
    return np.where((bf16 & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), bf16)


def assert_near(got: torch.Tensor, expected: torch.Tensor, precision: Precision) -> None:
    """Equal but for a few codes that were rounded to the next one; rows [..., D] that are not finite in both alike."""
    assert torch.equal(torch.isfinite(got), torch.isfinite(expected))
    step = {"fp32": 1e-5, "bf16": 2.0**-8, "int8": 1 / 126, "int5": 1 / 7, "int4": 1 / 3}[precision]
    bound = expected.abs().nan_to_num(0.0).amax(dim=-1, keepdim=True) * step + 1e-5
    difference = (got - expected).nan_to_num(0.0).abs()
    assert (difference <= bound).all()
    assert (difference.amax(dim=-1) <= bound[..., 0] / 50).float().mean() > 0.8


@pytest.mark.parametrize(
    ("precisions", "head_dim"),
    [
        (("int8", "int4"), 64),
        (("int4", "int8"), 80),
        (("int5", "int4"), 96),
        (("int5", "int4"), 112),
        (("int8", "bf16"), 128),
        (("bf16", "int4"), 80),
    ],
)
def test_moved_tokens_are_rotated_and_quantised_once_more(device: Device, precisions: Pair, head_dim: int) -> None:
    before = Memory(precisions, head_dim=head_dim)
    expected = Memory(precisions, head_dim=head_dim, data=before.data.copy())
    inv_freq = inverse_frequencies(head_dim)
    moves = [[3, 5, 4, 0, 7, -25], [0, 0, 5, 3, 9, 900], [1, 15, 2, 1, 1, 0]]
    for source, first, target, start, count, delta in moves:
        move_slots(
            expected.layout,
            expected.data,
            source_blocks_M=torch.full((count,), source),
            source_slots_M=torch.arange(first, first + count),
            target_blocks_M=torch.full((count,), target),
            target_slots_M=torch.arange(start, start + count),
            delta=delta,
            inv_freq=inv_freq,
        )
    arena, uploaded = before.on(device), device.upload(inv_freq.numpy())
    operations.move_slots(
        device, moves=np.array(moves, np.int32), inv_freq=uploaded, data=arena.data, layout=before.layout
    )
    moved = before.back_from(device, arena)
    blocks = torch.arange(6)
    assert torch.equal(moved.view.read(V_SIDE, slice(None), blocks), expected.view.read(V_SIDE, slice(None), blocks))
    k, expected_k = (memory.view.read(K_SIDE, slice(None), blocks) for memory in (moved, expected))
    assert_near(k, expected_k, precisions[K_SIDE])
    assert torch.equal(k[2], expected_k[2])  # delta 0: copied
    touched = moved.layout.rows_view(moved.data, K_SIDE) != before.layout.rows_view(before.data, K_SIDE)
    assert set(np.flatnonzero(touched.any(axis=(1, 2, 3, 4)))) == {2, 4, 5}

    # In place: what a move to another block gives.
    spans = np.array([[3, 5, 12, -25], [0, 0, 9, 900]], np.int32)
    operations.shift_k(device, spans=spans, inv_freq=uploaded, data=arena.data, layout=before.layout)
    shifted = before.back_from(device, arena)
    for view in (shifted.layout.rows_view, shifted.layout.scales_view):
        k = view(shifted.data, K_SIDE)
        assert (k[3, :, :, 5:12] == k[4, :, :, 0:7]).all()
        assert (k[0, :, :, 0:9] == k[5, :, :, 3:12]).all()
    assert (shifted.layout.rows_view(shifted.data, V_SIDE) == moved.layout.rows_view(moved.data, V_SIDE)).all()


@pytest.mark.parametrize("move", [[6, 0, 0, 0, 1, 1], [0, 0, -1, 0, 1, 1], [0, 10, 1, 0, 7, 0], [0, 0, 1, 0, -1, 0]])
def test_a_move_that_leaves_its_block_or_the_arena_is_refused(device: Device, move: list[int]) -> None:
    memory = Memory(("int8", "int4"))
    with pytest.raises(KernelError, match="outside"):
        operations.move_slots(
            device, moves=np.array([move], np.int32), inv_freq=None, data=memory.on(device).data, layout=memory.layout
        )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("source", "target"),
    [(("bf16", "bf16"), ("int8", "int5")), (("int8", "int5"), ("int5", "int4")), (("int5", "int4"), ("bf16", "bf16"))],
    ids=["quantised", "exchanged", "restored"],
)
def test_reencoded_blocks_have_the_bytes_of_the_reference(
    device: Device, head_dim: int, source: Pair, target: Pair
) -> None:
    before = Memory(source, head_dim=head_dim)
    scales_or_values = before.layout.scales_view(before.data, V_SIDE)
    if scales_or_values.size:
        scales_or_values[5, 1, 0, 7] = 0x7FC0
    else:
        before.layout.torch_view(before.data)[5, 1, V_SIDE, 0, 7, 11] = float("inf")
    expected = Memory(target, head_dim=head_dim)
    expected.data[:] = 0xEE
    arena, got = before.on(device), expected.on(device)
    sources, targets = ints(5, 0, 3), ints(1, 4, 2)
    reference.reencode_blocks(before, expected, sources, targets)
    reencode_blocks(device, arena, got, sources, targets)
    after = expected.back_from(device, got)
    view = after.view
    assert (~torch.isfinite(view.read(V_SIDE, slice(None), torch.tensor([1]))).all(dim=-1)).nonzero().tolist() == [
        [0, 1, 0, 7]
    ]
    for side in (K_SIDE, V_SIDE):
        if "bf16" in target:
            for memory in (after, expected):
                bits = memory.layout.rows_view(memory.data, side).view(np.uint16)
                bits[:] = one_nan(bits)
        for memory in (after, expected):
            scales = memory.layout.scales_view(memory.data, side)
            scales[:] = one_nan(scales)
    assert (after.data == expected.data).all()
    assert (device.download(arena.data) == before.data).all()


def test_a_side_of_equal_precision_is_copied_and_blocks_never_meet_their_sources(device: Device) -> None:
    wide = Memory(("bf16", "int4"))
    shared = wide.on(device)
    narrow = Memory(("int8", "int4"), data=shared.data)
    before = wide.data.copy()
    for source, target in [(0, 0), (0, 1), (1, 2)]:
        with pytest.raises(KernelError, match="overlaps"):
            reencode_blocks(device, shared, narrow, ints(source), ints(target))
    for sources, targets, message in [(ints(6), ints(0), "block 6 "), (ints(0, 1), ints(7, 7), "2 source")]:
        with pytest.raises(KernelError, match=message):
            reencode_blocks(device, shared, narrow, sources, targets)
    other = Memory(("int8", "int4"), head_dim=64, data=shared.data)
    with pytest.raises(KernelError, match="more than precision"):
        reencode_blocks(device, shared, other, ints(0), ints(5))
    assert (device.download(shared.data) == before).all()
    reencode_blocks(device, shared, narrow, ints(0), ints(6))
    after = Memory(("int8", "int4"), data=device.download(shared.data).copy())
    for view in (BlockLayout.rows_view, BlockLayout.scales_view):
        assert (view(after.layout, after.data, V_SIDE)[6] == view(wide.layout, before, V_SIDE)[0]).all()


def test_blocks_of_integers_are_copied_staged_and_summed_by_their_bytes(device: Device) -> None:
    memory = Memory(("int8", "int4"))
    blocks = memory.data.reshape(6, -1)
    arena = memory.on(device)
    sums = operations.block_checksums(device, memory.layout, arena.data, [4, 0])
    assert sums == [zlib.crc32(blocks[block].tobytes()) for block in (4, 0)]
    staging = operations.gather_blocks(device, memory.layout, arena.data, ints(4, 0))
    operations.scatter_blocks(device, memory.layout, staging, arena.data, ints(1, 5))
    operations.copy_blocks(device, memory.layout, arena.data, ints(3), ints(2))
    expected = blocks.copy()
    expected[[1, 5, 2]] = blocks[[4, 0, 3]]
    assert (device.download(arena.data).reshape(6, -1) == expected).all()


def test_rows_that_are_not_served_are_refused_by_name(device: Device) -> None:
    memory = Memory(("int8", "int8"), head_dim=24)
    with pytest.raises(KernelError, match="head_dim 24"):
        operations.move_slots(
            device, moves=np.zeros((1, 6), np.int32), inv_freq=None, data=memory.data, layout=memory.layout
        )
    with pytest.raises(KernelError, match="head_dim 24"):
        reencode_blocks(device, memory, Memory(("bf16", "int8"), head_dim=24), ints(0), ints(0))
