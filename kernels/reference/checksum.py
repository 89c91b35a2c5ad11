"""Checksum of a block: the same bytes have the same sum in an arena, on disk and on the wire."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from remora.kernels.layout import BlockLayout


def block_checksum(layout: BlockLayout, data: NDArray[np.uint8], block: int) -> int:
    """CRC-32 (zlib) of all bytes of the block, padding included. Raises KernelError outside the arena."""
    return zlib.crc32(layout.block_view(data, block).data)
