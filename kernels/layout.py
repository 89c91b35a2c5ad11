"""Where a value of KV lies in an arena: the only place that knows the layout of a block.

A block is contiguous: `[layer][K|V][kv_head][token][dim]`, padded to `geometry.block_bytes`. Shapes: N blocks,
L layers, 2 sides (K, V), H kv heads, B tokens a block, D head_dim.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError

#: Index of K and of V in the second axis of the views.
K_SIDE, V_SIDE = 0, 1

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: numpy has no bfloat16: its bits are seen as uint16.
_NUMPY_DTYPES: dict[str, type[np.float32] | type[np.uint16]] = {"fp32": np.float32, "bf16": np.uint16}


class BlockLayout:
    """Byte offsets inside blocks of one geometry, and strided views of a whole arena; owns no memory."""

    def __init__(self, geometry: KVGeometry) -> None:
        """Raises KernelError for what no kernel serves yet: several layer groups, quantised or mixed precision."""
        if len(geometry.groups) != 1:
            raise KernelError(f"{len(geometry.groups)} layer groups: only one group of full attention is served")
        group = geometry.groups[0]
        if group.k_precision != group.v_precision or group.k_precision not in _TORCH_DTYPES:
            raise KernelError(
                f"KV precision K={group.k_precision}, V={group.v_precision}: served are fp32 and bf16, K and V alike"
            )
        self.geometry = geometry
        self.num_layers = group.num_layers
        self.num_kv_heads = group.num_kv_heads
        self.head_dim = group.head_dim
        self.block_tokens = geometry.block_tokens
        self.block_bytes = geometry.block_bytes
        self.precision = group.k_precision
        self.torch_dtype = _TORCH_DTYPES[group.k_precision]
        self.value_bytes = self.torch_dtype.itemsize
        # In values, not bytes; block_bytes is a multiple of 64, so the first stride is whole.
        head = self.block_tokens * self.head_dim
        side = self.num_kv_heads * head
        self._strides = (self.block_bytes // self.value_bytes, 2 * side, side, head, self.head_dim, 1)

    def num_blocks(self, data: NDArray[np.uint8]) -> int:
        """Whole blocks of this geometry that lie in `data`."""
        return len(data) // self.block_bytes

    def offset_bytes(self, *, block: int, layer: int, side: int, kv_head: int = 0, token: int = 0) -> int:
        """Byte of the first value of a row of head_dim values, counted from the start of the arena."""
        index = (block, layer, side, kv_head, token)
        return self.value_bytes * sum(i * stride for i, stride in zip(index, self._strides, strict=False))

    def _shape(self, data: NDArray[np.uint8]) -> tuple[int, ...]:
        return (self.num_blocks(data), self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

    def torch_view(self, data: NDArray[np.uint8]) -> torch.Tensor:
        """The arena as kv_NL2HBD, without a copy: writing to the tensor writes to the arena."""
        whole = torch.from_numpy(data[: self.num_blocks(data) * self.block_bytes]).view(self.torch_dtype)
        return whole.as_strided(self._shape(data), self._strides)

    def numpy_view(self, data: NDArray[np.uint8]) -> NDArray[np.float32] | NDArray[np.uint16]:
        """The arena as kv_NL2HBD, without a copy; bf16 appears as uint16 bits."""
        dtype = _NUMPY_DTYPES[self.precision]
        strides = tuple(stride * self.value_bytes for stride in self._strides)
        return np.ndarray(self._shape(data), dtype, buffer=data, strides=strides)

    def block_view(self, data: NDArray[np.uint8], block: int) -> NDArray[np.uint8]:
        """The bytes of one block, padding included."""
        self.check_blocks(data, np.asarray([block], np.int32))
        return data[block * self.block_bytes : (block + 1) * self.block_bytes]

    def check_blocks(self, data: NDArray[np.uint8], blocks: NDArray[np.int32]) -> None:
        """Raises KernelError when a block index lies outside `data`."""
        limit = self.num_blocks(data)
        if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= limit):
            outside = blocks[(blocks < 0) | (blocks >= limit)].reshape(-1)[0]
            raise KernelError(f"block {int(outside)} lies outside an arena of {limit} blocks")
