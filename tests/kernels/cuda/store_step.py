"""A step of nine tokens of five sequences, stored in an arena of six blocks of 16: what tests of storing share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kv_world import LAYER
from numpy.typing import NDArray

from remora.kernels.cuda import operations
from remora.kernels.cuda.device import Device
from remora.kernels.cuda.place import block_major
from remora.kernels.layout import BlockLayout
from remora.kernels.reference import rope
from remora.kernels.reference.norm import rms_norm

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS = 9, 6, 2
_EPS, _ROPE_FACTOR = 1e-5, 1.2


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


_POSITIONS = ints(0, 1, 2, 777, 31, 4095, 130001, 17, 18)
BLOCK_T, SLOT_T = ints(5, 5, 5, 0, 3, 2, 2, 1, 1), ints(0, 1, 2, 9, 15, 0, 1, 1, 2)
_SEQUENCE_T = ints(0, 1, 2, 3, 3, 3, 3, 4, 4)


def to_device(device: Device, tensor: torch.Tensor) -> Any:
    return device.upload((tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy())


def inverse_frequencies(head_dim: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim / 2))


def store(
    device: Device, qkv: torch.Tensor, norms: torch.Tensor | None, *, data: Any, layout: BlockLayout
) -> tuple[Any, list[int]]:
    """Queries on the device, and which sequences are marked. `norms`: of q and of k."""
    q_out = to_device(device, torch.empty(NUM_TOKENS, NUM_HEADS, layout.head_dim, dtype=qkv.dtype))
    not_finite = device.upload(np.zeros(5, np.uint8))
    operations.store_kv(
        device,
        qkv=to_device(device, qkv),
        q_TQD=q_out,
        positions_T=device.upload(_POSITIONS),
        block_T=device.upload(BLOCK_T),
        slot_T=device.upload(SLOT_T),
        sequence_T=device.upload(_SEQUENCE_T),
        not_finite_S=not_finite,
        inv_freq=device.upload(inverse_frequencies(layout.head_dim).numpy()),
        rope_factor=_ROPE_FACTOR,
        q_norm=None if norms is None else device.upload(norms[0].numpy()),
        k_norm=None if norms is None else device.upload(norms[1].numpy()),
        eps=_EPS,
        data=data,
        layout=layout,
        place=block_major(layout, LAYER),
    )
    return q_out, device.download(not_finite).tolist()


def normed_and_rotated(
    qkv: torch.Tensor, norms: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in fp32 as the reference norms and rotates them."""
    q, k, v = qkv.to(torch.float32).split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], _EPS), rms_norm(k, norms[1], _EPS)
    tables = rope.rope_tables(torch.from_numpy(_POSITIONS), inverse_frequencies(qkv.shape[-1]), _ROPE_FACTOR)
    return rope.rotate(q, *tables), rope.rotate(k, *tables), v
