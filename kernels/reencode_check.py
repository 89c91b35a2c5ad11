"""What must be true of memories and blocks before anything is re-encoded, whatever does it. Without torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from remora.kernels.base import KVMemory
from remora.kernels.layout import BlockLayout
from remora.platform.base.errors import KernelError


def _host_address(data: NDArray[np.uint8]) -> int:
    return data.ctypes.data


def check_reencode(
    source: KVMemory,
    target: KVMemory,
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    *,
    address_of: Callable[[NDArray[np.uint8]], int] = _host_address,
) -> tuple[BlockLayout, BlockLayout]:
    """The layouts of both sides. `address_of` gives the address of a memory's first byte.

    Raises KernelError as reencode_blocks says.
    """
    from_layout, to_layout = BlockLayout(source.geometry), BlockLayout(target.geometry)
    if not source.geometry.differs_in_precision_only(target.geometry):
        raise KernelError(f"{source.geometry} and {target.geometry} differ in more than precision")
    if len(sources) != len(targets) or len(np.unique(targets)) != len(targets):
        raise KernelError(f"{len(sources)} source blocks for {len(np.unique(targets))} different target blocks")
    from_layout.check_blocks(source.data, sources)
    to_layout.check_blocks(target.data, targets)
    # Targets lie apart from each other: only the last one that begins before a source ends can reach into it.
    read = address_of(source.data) + sources.astype(np.int64) * from_layout.block_bytes
    written = np.sort(address_of(target.data) + targets.astype(np.int64) * to_layout.block_bytes)
    last = np.searchsorted(written, read + from_layout.block_bytes) - 1
    if len(written) and ((last >= 0) & (written[last] + to_layout.block_bytes > read)).any():
        raise KernelError("a target block overlaps a source block: blocks are re-encoded into other blocks")
    return from_layout, to_layout
