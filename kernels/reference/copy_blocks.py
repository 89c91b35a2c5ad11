"""Copies whole blocks inside an arena."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from remora.kernels.layout import BlockLayout
from remora.platform.base.errors import KernelError


def copy_blocks(
    layout: BlockLayout, data: NDArray[np.uint8], sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> None:
    """Copies block sources[i] to targets[i], as if all sources were read before any target is written.

    Raises KernelError for an index outside the arena, unequal lengths or a target named twice; then nothing is copied.
    """
    if len(sources) != len(targets):
        raise KernelError(f"{len(sources)} source blocks for {len(targets)} target blocks")
    if len(np.unique(targets)) != len(targets):
        raise KernelError("a target block is named twice")
    layout.check_blocks(data, sources)
    layout.check_blocks(data, targets)
    blocks = data[: layout.num_blocks(data) * layout.block_bytes].reshape(-1, layout.block_bytes)
    blocks[targets] = blocks[sources]
