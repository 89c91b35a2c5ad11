"""A model's weights in the memory of a device, one tensor after the other."""

from __future__ import annotations

import torch

from remora.kernels.base import DecoderShape, Weights
from remora.kernels.cuda.runtime import Runtime
from remora.kernels.grouped import GroupedTensor
from remora.kernels.weight_sizes import weight_sizes
from remora.platform.base.errors import KernelError

#: What our kernels multiply with, in fp32; all else is multiplied by the library, in the precision of the weights.
_FP32_KINDS = frozenset({"input_norm", "post_norm", "final_norm", "q_norm", "k_norm", "rope_inv_freq"})
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def matrix_dtype(shape: DecoderShape) -> torch.dtype:
    """Raises KernelError for weights that no kernel multiplies on a GPU."""
    dtype = _DTYPES.get(shape.weights)
    if dtype is None:
        raise KernelError(
            f"weights in {shape.weights} are not multiplied on GPUs yet; choose `weights: bf16` or a device of kind cpu"
        )
    return dtype


def load_weights(runtime: Runtime, shape: DecoderShape, weights: Weights) -> dict[str, torch.Tensor]:
    """All weights of the shape by name; a tied head is the embedding. Quantised tensors of a file become what they
    stand for. Raises KernelError for a weight that is missing, unknown or of another size."""
    dtype, sizes = matrix_dtype(shape), weight_sizes(shape)
    is_tied = shape.has_embedding and shape.has_head and "lm_head" not in weights
    if is_tied:
        del sizes["lm_head"]
    for name in weights:
        if name not in sizes:
            raise KernelError(f"weight {name} is not a weight of this decoder")
    loaded: dict[str, torch.Tensor] = {}
    for name, size in sizes.items():
        tensor = weights.get(name)
        if tensor is None:
            raise KernelError(f"weight {name} is missing")
        if tuple(tensor.shape) != size:
            raise KernelError(f"weight {name} has shape {tuple(tensor.shape)}, not {size}")
        values = tensor.to_fp32() if isinstance(tensor, GroupedTensor) else tensor.detach()
        is_fp32 = name.rpartition(".")[2] in _FP32_KINDS
        # Narrowed on the host, so that the device never holds a matrix twice.
        values = values.to(torch.float32 if is_fp32 else dtype).contiguous()
        loaded[name] = values.to(runtime.torch_device, copy=True)
    if is_tied:
        loaded["lm_head"] = loaded["embed"]
    return loaded
