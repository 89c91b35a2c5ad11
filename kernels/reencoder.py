"""Re-encodes blocks in host memory into another precision, with the best kernel there is."""

from __future__ import annotations

from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from remora.kernels.base import KVMemory
from remora.kernels.native import attention as native
from remora.kernels.native.library import load_library
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError


class HostMemory:
    """Bytes in host memory as one geometry sees them (kernels.base.KVMemory)."""

    def __init__(self, data: NDArray[np.uint8], geometry: KVGeometry) -> None:
        self.data = data
        self.geometry = geometry


def reencode_blocks(source: KVMemory, target: KVMemory, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
    """kernels.reference.reencode.reencode_blocks, with the same promises, errors and bytes, by one native thread where
    that is built and has the head size."""
    if _is_native(source.geometry):
        native.reencode_blocks(source, target, sources, targets)
        return
    from remora.kernels.reference.reencode import reencode_blocks as reference

    reference(source, target, sources, targets)


def prepare(geometry: KVGeometry) -> None:
    """Loads what re-encodes such blocks: the native library, or torch, which takes seconds."""
    if not _is_native(geometry):
        import_module("remora.kernels.reference.reencode")


def _is_native(geometry: KVGeometry) -> bool:
    if any(group.head_dim % 16 or group.head_dim > 256 for group in geometry.groups):
        return False
    try:
        load_library()
    except KernelError:
        return False
    return True
