"""Native K/V storage and paged attention against the torch reference, and bit by bit against themselves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from remora.kernels.batch import StepBatch
from remora.kernels.layout import BlockLayout
from remora.kernels.native.attention import AttentionResult, paged_attention, store_kv
from remora.kernels.reference import attention as reference
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision
from remora.platform.base.errors import KernelError

_LAYER, _NUM_LAYERS = 1, 2
Float32 = NDArray[np.float32]


@dataclass
class Arena:
    """A private arena full of NaN, as stale bytes may be."""

    geometry: KVGeometry
    data: NDArray[np.uint8]

    @property
    def kv(self) -> torch.Tensor:
        return BlockLayout(self.geometry).torch_view(self.data)


@dataclass
class Sequence:
    blocks: NDArray[np.int32]
    context_len: int
    #: Queries of every position; a test takes the last ones as the rows of its step.
    q_CQD: Float32


class World:
    """Sequences of random K, V and queries in an arena with shuffled blocks."""

    def __init__(
        self,
        lengths: list[int],
        *,
        precision: Precision = "bf16",
        head_dim: int = 64,
        num_kv_heads: int = 2,
        group: int = 3,
        block_tokens: int = 32,
        query_scale: float = 2.0,
    ) -> None:
        layers = LayerGroup(
            num_layers=_NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            k_precision=precision,
            v_precision=precision,
        )
        geometry = KVGeometry(groups=(layers,), block_tokens=block_tokens)
        rng = np.random.default_rng(11)
        columns = [-(-length // block_tokens) for length in lengths]
        order = rng.permutation(sum(columns) + 3).astype(np.int32)
        self.arena = Arena(geometry, np.full(len(order) * geometry.block_bytes, 0xFF, np.uint8))
        self.scale = head_dim**-0.5
        self.sequences = []
        for length, count in zip(lengths, columns, strict=True):
            blocks, order = order[:count], order[count:]
            shape = (length, num_kv_heads * group, head_dim)
            queries = rng.standard_normal(shape, dtype=np.float32) * query_scale
            self.sequences.append(Sequence(blocks, length, queries))
            kv = torch.from_numpy(rng.standard_normal((length, 2, num_kv_heads, head_dim), dtype=np.float32))
            for position in range(length):
                slot = (int(blocks[position // block_tokens]), _LAYER, slice(None), slice(None))
                self.arena.kv[(*slot, position % block_tokens)] = kv[position].to(self.arena.kv.dtype)

    def run(self, rows: list[tuple[int, int, int]], *, level: str, num_threads: int = 2) -> list[AttentionResult]:
        """Attention of a step of (sequence, first position, end position); one result per entry."""
        num_tokens = sum(end - first for _, first, end in rows)
        num_columns = max(len(sequence.blocks) for sequence in self.sequences)
        batch = StepBatch(max_tokens=num_tokens, max_sequences=len(rows), max_blocks=num_columns)
        for index, first, end in rows:
            blocks = self.sequences[index].blocks
            used = -(-end // self.arena.geometry.block_tokens)
            batch.add([0] * (end - first), first_position=first, blocks=blocks[:used])
        q = np.concatenate([self.sequences[index].q_CQD[first:end] for index, first, end in rows])
        result = paged_attention(
            batch, self.arena, q, layer=_LAYER, scale=self.scale, level=level, num_threads=num_threads
        )
        starts = batch.query_start_S
        return [
            AttentionResult(
                out_TQD=result.out_TQD[starts[i] : starts[i + 1]], lse_TQ=result.lse_TQ[starts[i] : starts[i + 1]]
            )
            for i in range(len(rows))
        ]

    def expected(self, index: int, first: int, end: int, *, rounded_queries: bool) -> tuple[Float32, Float32]:
        sequence = self.sequences[index]
        q = torch.from_numpy(sequence.q_CQD[first:end])
        if rounded_queries:
            q = q.to(torch.bfloat16)
        out, lse = reference.paged_attention(
            self.arena.kv,
            layer=_LAYER,
            q_TQD=q,
            blocks=torch.from_numpy(sequence.blocks).long(),
            context_len=end,
            scale=self.scale,
        )
        return out.numpy(), lse.numpy()


def same_bits(a: AttentionResult, b: AttentionResult) -> bool:
    return a.out_TQD.tobytes() == b.out_TQD.tobytes() and a.lse_TQ.tobytes() == b.lse_TQ.tobytes()


def check_against_reference(world: World, rows: list[tuple[int, int, int]], level: str) -> None:
    # The AMX path multiplies bf16 by bf16: queries and weights are rounded to 8 bits.
    rounds = level == "amx" and world.arena.geometry.groups[0].k_precision == "bf16"
    bound = 2.0**-7 if rounds else 2e-5
    for (index, first, end), result in zip(rows, world.run(rows, level=level), strict=True):
        out, lse = world.expected(index, first, end, rounded_queries=rounds)
        assert np.abs(result.out_TQD - out).max() < bound
        assert np.abs(result.lse_TQ - lse).max() < bound


_LENGTHS = [1, 37, 200, 1111]
_ROWS = [(0, 0, 1), (1, 36, 37), (2, 151, 200), (3, 1080, 1111)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_every_head_size_equals_the_reference(level: str, precision: Precision, head_dim: int) -> None:
    check_against_reference(World(_LENGTHS, precision=precision, head_dim=head_dim), _ROWS, level)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("group", "block_tokens"), [(1, 16), (4, 128), (8, 64), (5, 32)])
def test_every_group_and_block_size_equals_the_reference(
    level: str, precision: Precision, group: int, block_tokens: int
) -> None:
    world = World(_LENGTHS, precision=precision, group=group, num_kv_heads=1, block_tokens=block_tokens)
    check_against_reference(world, _ROWS, level)


def test_scores_of_thousands_neither_overflow_nor_vanish(level: str) -> None:
    world = World([700], precision="fp32", query_scale=1000.0)
    [result] = world.run([(0, 690, 700)], level=level)
    out, lse = world.expected(0, 690, 700, rounded_queries=False)
    assert np.abs(result.out_TQD - out).max() < 1e-2
    assert np.abs(result.lse_TQ / lse - 1).max() < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_row_has_the_same_bits_in_any_company(level: str, precision: Precision, head_dim: int) -> None:
    world = World([1200, 90, 513, 7], precision=precision, head_dim=head_dim)
    whole = [(0, 1100, 1200), (1, 0, 90), (2, 512, 513), (3, 0, 7)]
    together = world.run(whole, level=level, num_threads=2)
    for rows, result in zip(whole, together, strict=True):
        [alone] = world.run([rows], level=level, num_threads=1)
        assert same_bits(alone, result)
    for num_threads in (1, 3, 8):
        again = world.run(whole, level=level, num_threads=num_threads)
        assert all(same_bits(a, b) for a, b in zip(again, together, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(level: str, precision: Precision, group: int) -> None:
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_beyond_the_context_change_nothing(level: str, precision: Precision) -> None:
    world = World([45, 530], precision=precision)
    rows = [(0, 40, 45), (1, 529, 530)]
    before = world.run(rows, level=level)
    assert all(np.isfinite(result.out_TQD).all() for result in before)
    for sequence in world.sequences:
        first_stale = sequence.context_len % 32
        world.arena.kv[int(sequence.blocks[-1]), :, :, :, first_stale:] = 3.0e38
    world.arena.kv[:, 1 - _LAYER] = float("inf")
    after = world.run(rows, level=level)
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
def test_a_bad_value_marks_its_own_rows_and_no_other_sequence(
    level: str, precision: Precision, bad: float, side: int
) -> None:
    world = World([100, 600, 64], precision=precision)
    rows = [(0, 90, 100), (1, 595, 600), (2, 63, 64)]
    clean = world.run(rows, level=level)
    block, slot = int(world.sequences[1].blocks[520 // 32]), 520 % 32
    world.arena.kv[block, _LAYER, side, 0, slot, 5] = bad
    dirty = world.run(rows, level=level)
    assert same_bits(clean[0], dirty[0])
    assert same_bits(clean[2], dirty[2])
    marked = ~np.isfinite(dirty[1].out_TQD[:, :3]).all(axis=-1)
    # An infinite K gives a score of plus or minus infinity by the sign of the query; the latter has weight 0.
    reads = world.sequences[1].q_CQD[595:600, :3, 5] > 0 if side == 0 and bad == float("inf") else True
    assert (marked == reads).all()
    assert dirty[1].out_TQD[:, 3:].tobytes() == clean[1].out_TQD[:, 3:].tobytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_store_writes_the_slots_of_the_step_and_no_other_byte(
    level: str, precision: Precision, num_threads: int
) -> None:
    world = World([70, 33], precision=precision, head_dim=80)
    expected = world.arena.data.copy()
    expected_kv = BlockLayout(world.arena.geometry).torch_view(expected)
    batch = StepBatch(max_tokens=64, max_sequences=2, max_blocks=3)
    spans = [(0, 20, 70), (1, 32, 33)]
    for index, first, end in spans:
        batch.add([0] * (end - first), first_position=first, blocks=world.sequences[index].blocks)
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, batch.num_tokens, 2, 80), dtype=np.float32) * 1e3
    k[0, 0, 0], v[3, 1, 7], v[4, 0, 1] = np.nan, np.inf, -0.0
    row = 0
    for index, first, end in spans:
        for position in range(first, end):
            block, slot = int(world.sequences[index].blocks[position // 32]), position % 32
            for side, values in enumerate((k, v)):
                expected_kv[block, _LAYER, side, :, slot] = torch.from_numpy(values[row]).to(expected_kv.dtype)
            row += 1
    store_kv(batch, world.arena, k, v, layer=_LAYER, level=level, num_threads=num_threads)
    is_nan = torch.isnan(expected_kv)
    assert torch.equal(torch.isnan(world.arena.kv), is_nan)
    assert torch.equal(world.arena.kv[~is_nan], expected_kv[~is_nan])


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_outside_the_arena_is_refused(level: str, block: int) -> None:
    world = World([40])
    before = world.arena.data.copy()
    batch = StepBatch(max_tokens=1, max_sequences=1, max_blocks=2)
    batch.add([0], first_position=39, blocks=[1, block])
    rows = np.zeros((1, 2, 64), np.float32)
    with pytest.raises(KernelError, match=f"block {block} lies outside an arena of 5"):
        store_kv(batch, world.arena, rows, rows, layer=0, level=level)
    with pytest.raises(KernelError, match=f"block {block} lies outside an arena of 5"):
        paged_attention(batch, world.arena, np.zeros((1, 6, 64), np.float32), layer=0, scale=1.0, level=level)
    assert (world.arena.data == before).all()


def test_shapes_that_are_not_served_are_refused_by_name(level: str) -> None:
    for sizes, message in [({"head_dim": 24}, "head_dim 24"), ({"block_tokens": 48}, "block_tokens 48")]:
        with pytest.raises(KernelError, match=message):
            World([40], **sizes).run([(0, 39, 40)], level=level)  # type: ignore[arg-type]
    batch = StepBatch(max_tokens=1, max_sequences=1, max_blocks=2)
    world = World([40])
    batch.add([0], first_position=39, blocks=world.sequences[0].blocks)
    with pytest.raises(KernelError, match="do not fit 2 kv heads"):
        paged_attention(batch, world.arena, np.zeros((1, 3, 64), np.float32), layer=0, scale=1.0, level=level)
    with pytest.raises(KernelError, match="layers 2 to 2 of 2"):
        paged_attention(batch, world.arena, np.zeros((1, 6, 64), np.float32), layer=2, scale=1.0, level=level)
