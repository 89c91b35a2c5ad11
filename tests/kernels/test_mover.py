"""Moving tokens between blocks: each lands with its V, and with K as if it had been computed at its new position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from remora.kernels.layout import K_SIDE, V_SIDE, BlockLayout
from remora.kernels.mover import KVMover
from remora.kernels.reference.kv_view import KVView
from remora.kernels.reference.rope import rope_tables, rotate
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.sequence_commands import Move
from remora.platform.base.errors import KernelError

INV_FREQ = (10000.0 ** -(np.arange(16) / 16.0)).astype(np.float32)


def memory_of(precision: str, num_blocks: int = 24) -> Any:
    group = LayerGroup(num_layers=2, num_kv_heads=2, head_dim=32, k_precision=precision, v_precision=precision)  # type: ignore[arg-type]
    geometry = KVGeometry(groups=(group,), block_tokens=16)
    return SimpleNamespace(geometry=geometry, data=np.zeros(num_blocks * geometry.block_bytes, np.uint8))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 6e-2)])
def test_tokens_are_what_they_would_be_at_their_new_positions(precision: str, tolerance: float) -> None:
    """170 tokens at positions 33 to 202 move to 12 to 181, across the borders of blocks; more than one part's worth."""
    torch.manual_seed(1)
    memory = memory_of(precision)
    kv = BlockLayout(memory.geometry).torch_view(memory.data)
    plain_TLHD, values_TLHD = torch.randn(170, 2, 2, 32), torch.randn(170, 2, 2, 32)

    def k_at(first: int) -> torch.Tensor:
        tables = rope_tables(torch.arange(first, first + 170), torch.from_numpy(INV_FREQ))
        return rotate(plain_TLHD.reshape(170, -1, 32), *tables).reshape(170, 2, 2, 32).to(kv.dtype)

    for token, k_LHD in enumerate(k_at(33)):
        block, slot = divmod(33 % 16 + token, 16)
        kv[block, :, K_SIDE, :, slot], kv[block, :, V_SIDE, :, slot] = k_LHD, values_TLHD[token].to(kv.dtype)
    before = kv[:12].clone()
    moves, source, target, left = [], 33 % 16, 12, 170
    while left:
        count = min(left, 16 - source % 16, 16 - target % 16)
        moves.append(Move(source // 16, source % 16, 12 + target // 16, target % 16, count, -21))
        source, target, left = source + count, target + count, left - count
    KVMover(memory, INV_FREQ).move(moves)
    for token, k_LHD in enumerate(k_at(12)):
        block, slot = divmod(12 + token, 16)
        assert torch.allclose(kv[12 + block, :, K_SIDE, :, slot].float(), k_LHD.float(), atol=tolerance)
        assert torch.equal(kv[12 + block, :, V_SIDE, :, slot], values_TLHD[token].to(kv.dtype))
    assert torch.equal(kv[:12], before)


@pytest.mark.parametrize(
    "move", [Move(24, 0, 1, 0, 1, 0), Move(0, 0, -1, 0, 1, 0), Move(0, 12, 1, 0, 5, 0), Move(0, 0, 1, -1, 2, 0)]
)
def test_a_place_outside_the_memory_is_refused_before_a_byte_is_written(move: Move) -> None:
    memory = memory_of("fp32")
    memory.data[:] = 1
    with pytest.raises(KernelError):
        KVMover(memory, INV_FREQ).move([Move(0, 0, 5, 0, 4, 3), move])
    assert (memory.data == 1).all()


@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 0.1), ("int5", 0.6), ("int4", 1.2)])
def test_quantised_tokens_are_rotated_and_quantised_once_more(precision: str, tolerance: float) -> None:
    torch.manual_seed(2)
    memory = memory_of(precision)
    layout = BlockLayout(memory.geometry)
    view, tokens = KVView(layout, memory.data), torch.arange(16)
    zeros = torch.zeros(16, dtype=torch.int64)
    plain_THD = torch.randn(16, 2, 32)
    for layer in range(2):
        k_THD = rotate(plain_THD, *rope_tables(40 + tokens, torch.from_numpy(INV_FREQ)))
        view.write(K_SIDE, layer, zeros, tokens, k_THD)
        view.write(V_SIDE, layer, zeros, tokens, plain_THD)
    KVMover(memory, INV_FREQ).move([Move(0, 0, 3, 5, 11, -25), Move(0, 11, 4, 0, 5, -25)])
    wanted_THD = rotate(plain_THD, *rope_tables(15 + tokens, torch.from_numpy(INV_FREQ)))
    for side, expected in ((K_SIDE, wanted_THD), (V_SIDE, plain_THD)):
        read = view.read(side, 1, torch.tensor([3, 4])).transpose(1, 2).reshape(32, 2, 32)[5:21]
        assert torch.allclose(read, expected, atol=tolerance)
    source, target = (view.read(V_SIDE, 0, torch.tensor([block])) for block in (0, 3))
    assert torch.equal(source[:, :, :11], target[:, :, 5:]), "V is copied, not quantised again"


def test_kv_whose_rotation_is_not_known_is_not_moved() -> None:
    assert KVMover(memory_of("int4"), INV_FREQ).can_move
    mover = KVMover(memory_of("bf16"), None)
    assert not mover.can_move
    with pytest.raises(KernelError):
        mover.move([Move(0, 0, 1, 0, 1, 1)])
