"""A kernels.mover.Mover of memory on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from remora.kernels.base import KVMemory
from remora.kernels.cuda.operations import move_slots
from remora.kernels.cuda.runtime import Runtime
from remora.kernels.layout import BlockLayout
from remora.kernels.mover import check_block_places
from remora.namespaces.sequence_commands import Move
from remora.platform.base.errors import KernelError


class CudaMover:
    """Shares the runtime with the decoder, and the engine's thread."""

    def __init__(self, runtime: Runtime, memory: KVMemory, rope_inv_freq: NDArray[np.float32] | None) -> None:
        self._runtime = runtime
        self._memory = memory
        self._rope_inv_freq = rope_inv_freq
        self.can_move = rope_inv_freq is not None and len(memory.geometry.groups) == 1

    def copy_block(self, source: int, target: int) -> None:
        check_block_places(self._memory, source, target)
        with self._runtime.turn():
            self._block(target).copy_(self._block(source))
            self._wait()

    def write_block(self, block: int, bytes_B: NDArray[np.uint8]) -> None:
        check_block_places(self._memory, block)
        with self._runtime.turn():
            self._block(block).copy_(torch.from_numpy(bytes_B))
            self._wait()

    def move(self, moves: Sequence[Move]) -> None:
        if not moves:
            return
        if self._rope_inv_freq is None or not self.can_move:
            raise KernelError("the KV of this model cannot be moved to other positions")
        rows = np.array(
            [
                (each.source_block, each.source_slot, each.target_block, each.target_slot, each.num_tokens, each.delta)
                for each in moves
            ],
            np.int32,
        )
        runtime, memory = self._runtime, self._memory
        with runtime.turn():
            move_slots(
                runtime,
                moves=rows,
                inv_freq=runtime.upload(self._rope_inv_freq),
                data=runtime.tensor(memory.data),
                layout=BlockLayout(memory.geometry),
            )
            self._wait()

    def _block(self, block: int) -> torch.Tensor:
        size = self._memory.geometry.block_bytes
        return self._runtime.tensor(self._memory.data)[block * size : (block + 1) * size]

    def _wait(self) -> None:
        self._runtime.download(self._runtime.tensor(self._memory.data)[:1])
