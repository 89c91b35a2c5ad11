"""Does in a mapped arena what a pool says about edited sequences (namespaces/sequence_commands.py: Move)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from remora.kernels.base import Decoder, KVMemory
from remora.kernels.layout import BlockLayout
from remora.namespaces.sequence_commands import Move
from remora.platform.base.errors import KernelError


class Mover(Protocol):
    """Changes blocks of one memory; each method returns when it is done."""

    @property
    def can_move(self) -> bool:
        """Whether tokens can go to other positions."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copies a whole block, whatever its precision. Raises KernelError for a place outside the memory."""
        ...

    def write_block(self, block: int, bytes_B: NDArray[np.uint8]) -> None:
        """Writes a block that was read elsewhere. Raises KernelError for a place outside the memory."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Does the moves; they may be repeated. Raises KernelError for a place outside the memory, before any byte."""
        ...


def mover_of(decoder: Decoder, memory: KVMemory, rope_inv_freq: NDArray[np.float32] | None) -> Mover:
    """The decoder's own, where its memory is not the host's."""
    make = getattr(decoder, "mover", KVMover)
    mover: Mover = make(memory, rope_inv_freq)
    return mover


@functools.cache
def prepare_moves() -> None:
    """Begins to load what `KVMover.move` needs, once and in the background: torch, which a replica whose weights were
    packed already does not have yet, takes a second or two."""
    threading.Thread(
        target=import_module, args=("remora.kernels.reference.move_slots",), name="prepare-moves", daemon=True
    ).start()


class KVMover:
    """Copies tokens between blocks of one geometry and rotates their K, with the torch reference: a Mover of memory
    that the host maps.

    Without `rope_inv_freq` (a model whose rope is not known here) nothing can be moved: `can_move` says so, and the
    caller computes such tokens again.
    """

    def __init__(self, memory: KVMemory, rope_inv_freq: NDArray[np.float32] | None) -> None:
        self._memory = memory
        self._rope_inv_freq = rope_inv_freq
        self.can_move = rope_inv_freq is not None and len(memory.geometry.groups) == 1

    def copy_block(self, source: int, target: int) -> None:
        check_block_places(self._memory, source, target)
        size, data = self._memory.geometry.block_bytes, self._memory.data
        data[target * size : (target + 1) * size] = data[source * size : (source + 1) * size]

    def write_block(self, block: int, bytes_B: NDArray[np.uint8]) -> None:
        check_block_places(self._memory, block)
        size = self._memory.geometry.block_bytes
        self._memory.data[block * size : (block + 1) * size] = bytes_B

    def move(self, moves: Sequence[Move]) -> None:
        if not moves:
            return
        if not self.can_move:
            raise KernelError("the KV of this model cannot be moved to other positions")
        import torch

        layout = BlockLayout(self._memory.geometry)
        places = np.array([[m.source_block, m.target_block, m.source_slot, m.target_slot] for m in moves], np.int64)
        layout.check_blocks(self._memory.data, places[:, :2].astype(np.int32))
        ends = places[:, 2:] + np.array([[m.num_tokens] for m in moves])
        if (places[:, 2:] < 0).any() or (ends > layout.block_tokens).any():
            raise KernelError(f"a move lies outside a block of {layout.block_tokens} tokens")
        num_threads = torch.get_num_threads()
        # Short operations: on a busy machine several threads would mostly wait for each other.
        torch.set_num_threads(1)
        try:
            self._move(layout, moves)
        finally:
            torch.set_num_threads(num_threads)

    def _move(self, layout: BlockLayout, moves: Sequence[Move]) -> None:
        import torch

        from remora.kernels.reference.move_slots import move_slots

        inv_freq = torch.from_numpy(self._rope_inv_freq)
        for delta in sorted({move.delta for move in moves}):
            tokens_4M = torch.tensor(
                [
                    (move.source_block, move.source_slot + i, move.target_block, move.target_slot + i)
                    for move in moves
                    if move.delta == delta
                    for i in range(move.num_tokens)
                ]
            ).T
            move_slots(
                layout,
                self._memory.data,
                source_blocks_M=tokens_4M[0],
                source_slots_M=tokens_4M[1],
                target_blocks_M=tokens_4M[2],
                target_slots_M=tokens_4M[3],
                delta=delta,
                inv_freq=inv_freq,
            )


def check_block_places(memory: KVMemory, *blocks: int) -> None:
    """Raises KernelError for a block outside the memory."""
    size = memory.geometry.block_bytes
    for block in blocks:
        if block < 0 or (block + 1) * size > len(memory.data):
            raise KernelError(f"block {block} of {size} bytes is outside the memory")
