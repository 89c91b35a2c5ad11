"""Where a value of KV lies in an arena: the only place that knows the layout of a block.

A block is contiguous: `[layer][K|V][kv_head][token][dim]`, padded to `geometry.block_bytes`. Where K or V is quantised,
each head's values are followed by its scales, `[token][group]` in bf16 (kernels/reference/quantise.py). Shapes:
N blocks, L layers, 2 sides (K, V), H kv heads, B tokens a block, D head_dim, G scales a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from remora.namespaces.geometry import SCALE_BYTES, KVGeometry, row_bytes, scales_per_row
from remora.platform.base.errors import KernelError

if TYPE_CHECKING:
    import torch

#: Index of K and of V in the second axis of the views.
K_SIDE, V_SIDE = 0, 1

#: Of precisions that are not quantised.
#: numpy has no bfloat16: its bits are seen as uint16.
_NUMPY_DTYPES: dict[str, type[np.float32] | type[np.uint16]] = {"fp32": np.float32, "bf16": np.uint16}


class BlockLayout:
    """Byte offsets inside blocks of one geometry, and strided views of a whole arena; owns no memory."""

    def __init__(self, geometry: KVGeometry) -> None:
        """Raises KernelError for what no kernel serves yet: several layer groups."""
        if len(geometry.groups) != 1:
            raise KernelError(f"{len(geometry.groups)} layer groups: only one group of full attention is served")
        group = geometry.groups[0]
        for precision, multiple in (("int5", 16), ("int4", 2)):
            if group.head_dim % multiple and precision in (group.k_precision, group.v_precision):
                raise KernelError(f"head_dim {group.head_dim}: {precision} needs a multiple of {multiple}")
        self.geometry = geometry
        self.num_layers = group.num_layers
        self.num_kv_heads = group.num_kv_heads
        self.head_dim = group.head_dim
        self.block_tokens = geometry.block_tokens
        self.block_bytes = geometry.block_bytes
        #: Of K and of V, as all pairs below: of a row (a token's values of one head), and of a head in a block with its
        #: scales.
        self.precisions = geometry.kv_precision
        self.row_bytes = tuple(row_bytes(precision, group.head_dim) for precision in self.precisions)
        self.num_scales = tuple(scales_per_row(precision, group.head_dim) for precision in self.precisions)
        self.head_bytes = tuple(
            self.block_tokens * (row + SCALE_BYTES * scales)
            for row, scales in zip(self.row_bytes, self.num_scales, strict=True)
        )
        #: Of K and V of one layer of a block.
        self.layer_bytes = self.num_kv_heads * sum(self.head_bytes)

    @property
    def precision(self) -> str:
        """That of K and V alike. Raises KernelError when they differ or are quantised: few kernels serve that."""
        k, v = self.precisions
        if k != v or k not in _NUMPY_DTYPES:
            raise KernelError(f"KV precision K={k}, V={v}: served here are fp32 and bf16, K and V alike")
        return k

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of K and V alike; raises like `precision`."""
        from remora.kernels.reference.row_codec import TORCH_DTYPES

        return TORCH_DTYPES[self.precision]

    @property
    def value_bytes(self) -> int:
        """Of K and V alike; raises like `precision`."""
        return np.dtype(_NUMPY_DTYPES[self.precision]).itemsize

    def num_blocks(self, data: NDArray[np.uint8]) -> int:
        """Whole blocks of this geometry that lie in `data`."""
        return len(data) // self.block_bytes

    def offset_bytes(self, *, block: int, layer: int, side: int, kv_head: int = 0, token: int = 0) -> int:
        """Byte of the first value of a row of head_dim values, counted from the start of the arena."""
        start = block * self.block_bytes + layer * self.layer_bytes + side * self.num_kv_heads * self.head_bytes[K_SIDE]
        return start + kv_head * self.head_bytes[side] + token * self.row_bytes[side]

    def rows_view(self, data: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
        """The bytes of K's or V's values as [N, L, H, B, bytes a row], without a copy."""
        return self._view(data, side, 0, self.row_bytes[side], 1, np.uint8)

    def scales_view(self, data: NDArray[np.uint8], side: int) -> NDArray[np.uint16]:
        """K's or V's scales as bf16 bits [N, L, H, B, G], without a copy; G is 0 for what has none."""
        start = self.block_tokens * self.row_bytes[side]
        return self._view(data, side, start, self.num_scales[side], SCALE_BYTES, np.uint16)

    def _view(self, data: NDArray[np.uint8], side: int, start: int, count: int, size: int, dtype: type) -> NDArray[Any]:
        offset = self.offset_bytes(block=0, layer=0, side=side) + start
        shape = (self.num_blocks(data), self.num_layers, self.num_kv_heads, self.block_tokens, count)
        strides = (self.block_bytes, self.layer_bytes, self.head_bytes[side], count * size, size)
        return np.ndarray(shape, dtype, buffer=data, offset=offset, strides=strides)

    @property
    def _strides(self) -> tuple[int, ...]:
        """In values, not bytes; block_bytes is a multiple of 64, so the first stride is whole."""
        head = self.block_tokens * self.head_dim
        side = self.num_kv_heads * head
        return (self.block_bytes // self.value_bytes, 2 * side, side, head, self.head_dim, 1)

    def _shape(self, data: NDArray[np.uint8]) -> tuple[int, ...]:
        return (self.num_blocks(data), self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

    def torch_view(self, data: NDArray[np.uint8]) -> torch.Tensor:
        """The arena as kv_NL2HBD, without a copy: writing to it writes to the arena. Raises like `precision`."""
        import torch

        whole = torch.from_numpy(data[: self.num_blocks(data) * self.block_bytes]).view(self.torch_dtype)
        return whole.as_strided(self._shape(data), self._strides)

    def numpy_view(self, data: NDArray[np.uint8]) -> NDArray[np.float32] | NDArray[np.uint16]:
        """The arena as kv_NL2HBD, without a copy; bf16 appears as uint16 bits. Raises like `precision`."""
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


class Layouts:
    """The layouts of one geometry in any precision of K and V, each made on first use."""

    def __init__(self, geometry: KVGeometry) -> None:
        """Raises KernelError like BlockLayout."""
        self.own = BlockLayout(geometry)
        self._found = {geometry: self.own}

    def find(self, geometry: KVGeometry) -> BlockLayout:
        """Raises KernelError for a geometry that differs in more than precision, or that no kernel serves."""
        layout = self._found.get(geometry)
        if layout is None:
            if not self.own.geometry.differs_in_precision_only(geometry):
                raise KernelError(f"memory of geometry {geometry}, decoder of {self.own.geometry}")
            layout = self._found[geometry] = BlockLayout(geometry)
        return layout
