"""Blocks written anew in another precision: the native kernel against the reference, and what must not happen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.native import attention as native
from remora.kernels.reference.kv_view import KVView
from remora.kernels.reference.reencode import reencode_blocks
from remora.namespaces.geometry import KVGeometry, LayerGroup, Precision
from remora.platform.base.errors import KernelError

BF16 = KVGeometry(groups=(LayerGroup(num_layers=3, num_kv_heads=2, head_dim=80),), block_tokens=16)
#: Largest error of a value, as a share of the largest value of its row.
BOUNDS: dict[Precision, float] = {"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 250, "int5": 0.15, "int4": 0.3}


class Memory:
    def __init__(self, geometry: KVGeometry, num_blocks: int = 6, data: NDArray[np.uint8] | None = None) -> None:
        self.geometry = geometry
        self.data = np.full(num_blocks * geometry.block_bytes, 0xFF, np.uint8) if data is None else data

    def values(self, block: int, side: int) -> torch.Tensor:
        view = KVView(BlockLayout(self.geometry), self.data)
        return view.read(side, slice(None), torch.tensor([block]))[0]


def filled(geometry: KVGeometry, seed: int = 0) -> Memory:
    memory = Memory(geometry)
    view = KVView(BlockLayout(geometry), memory.data)
    generator = torch.Generator().manual_seed(seed)
    for block, layer, side in itertools.product(range(6), range(3), (K_SIDE, V_SIDE)):
        rows = torch.randn(16, 2, 80, generator=generator) * 4
        view.write(side, layer, torch.full((16,), block), torch.arange(16), rows)
    return memory


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("bf16", "bf16"), ("int8", "int4")),
        (("int8", "int4"), ("int4", "int8")),
        (("int4", "int8"), ("bf16", "bf16")),
        (("bf16", "int5"), ("int5", "int4")),
        (("fp32", "bf16"), ("bf16", "int4")),
    ],
)
def test_native_blocks_have_the_bytes_of_the_reference(
    level: str, source: tuple[Precision, Precision], target: tuple[Precision, Precision]
) -> None:
    before = filled(BF16.with_precision(source))
    expected, got = (Memory(BF16.with_precision(target)) for _ in range(2))
    sources, targets = np.array([5, 0, 3], np.int32), np.array([1, 4, 2], np.int32)
    reencode_blocks(before, expected, sources, targets)
    native.reencode_blocks(before, got, sources, targets, level=level, num_threads=2)
    if {"int5", "int4"} & set(source):
        # Rotating back rounds in the last bit, by a fused product or not: a value between two codes may go either way.
        for block, side in itertools.product(targets.tolist(), (K_SIDE, V_SIDE)):
            difference = (got.values(block, side) - expected.values(block, side)).abs()
            assert difference.max() <= expected.values(block, side).abs().max() * BOUNDS[target[side]]
    else:
        assert (got.data == expected.data).all()
    assert (got.data.reshape(6, -1)[[0, 3, 5]] == 0xFF).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int5", "int4"])
def test_a_block_keeps_its_values_to_the_precision_that_it_goes_through(precision: Precision) -> None:
    before, through, after = filled(BF16), Memory(BF16.with_precision((precision, precision))), Memory(BF16)
    one, two = np.array([1], np.int32), np.array([2], np.int32)
    reencode_blocks(before, through, one, two)
    reencode_blocks(through, after, two, one)
    for side in (K_SIDE, V_SIDE):
        values, kept = before.values(1, side), after.values(1, side)
        bound = values.abs().amax(dim=-1, keepdim=True) * (BOUNDS[precision] + BOUNDS["bf16"])
        assert ((kept - values).abs() <= bound).all()
        if precision == "fp32":
            assert torch.equal(kept, values)


@pytest.mark.parametrize("precision", ["int8", "int5", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_marked_in_its_row_alone(level: str, precision: Precision, bad: float) -> None:
    before, after = filled(BF16), Memory(BF16.with_precision((precision, precision)))
    BlockLayout(BF16).torch_view(before.data)[3, 1, V_SIDE, 0, 7, 11] = bad
    native.reencode_blocks(before, after, np.array([3], np.int32), np.array([0], np.int32), level=level)
    is_finite_LHB = torch.isfinite(after.values(0, V_SIDE)).all(dim=-1)
    assert (~is_finite_LHB).nonzero().tolist() == [[1, 0, 7]]
    assert torch.isfinite(after.values(0, K_SIDE)).all()


def test_blocks_are_never_written_over_their_sources(level: str) -> None:
    small = BF16.with_precision(("int8", "int8"))
    memory = filled(BF16)
    view = Memory(small, data=memory.data)
    before = memory.data.copy()
    for reencode in (reencode_blocks, lambda *call: native.reencode_blocks(*call, level=level)):
        # Block 1 of the smaller geometry begins inside block 0 of the larger.
        for source, target in [(0, 0), (0, 1), (1, 2)]:
            with pytest.raises(KernelError, match="overlaps"):
                reencode(memory, view, np.array([source], np.int32), np.array([target], np.int32))
        for sources, targets, message in [
            ([6], [0], "block 6 "),
            ([0], [99], "block 99 "),
            ([0, 1], [9, 9], "2 source"),
        ]:
            with pytest.raises(KernelError, match=message):
                reencode(memory, view, np.array(sources, np.int32), np.array(targets, np.int32))
        other = KVGeometry(groups=(LayerGroup(num_layers=3, num_kv_heads=2, head_dim=64),), block_tokens=16)
        with pytest.raises(KernelError, match="more than precision"):
            reencode(memory, Memory(other), np.array([0], np.int32), np.array([0], np.int32))
    assert (memory.data == before).all()
    reencode_blocks(memory, view, np.array([0], np.int32), np.array([4], np.int32))
    assert (memory.data[: BF16.block_bytes] == before[: BF16.block_bytes]).all()
