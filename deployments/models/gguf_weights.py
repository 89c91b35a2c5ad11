"""Tensors of a GGUF file, dequantised one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from remora.deployments.models.gguf_file import GGUFFile
from remora.deployments.models.weight_map import GGUF
from remora.platform.base.errors import ModelError

#: Values dequantised at once: bounds the working memory of one tensor.
_VALUES_AT_ONCE = 4 * 1024 * 1024


class GGUFSource:
    """A canonical_weights.TensorSource over a mapped file."""

    naming = GGUF

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.interleaved = file.architecture == "llama"

    def where(self) -> str:
        return str(self._file.path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._file.tensors.items()}

    def ignorable(self, name: str) -> bool:
        # Rope's divisors are read with the config.
        return name == "rope_freqs.weight"

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._file.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.type_no)
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(f"{self.where()}: tensor {name} has the unknown type {tensor.type_no}.") from None
        num_values = math.prod(tensor.shape)
        if num_values % block_values or tensor.shape[-1] % block_values:
            raise ModelError(
                f"{self.where()}: tensor {name} of shape {tensor.shape} is not whole blocks of {kind.name}."
            )
        data = self._file.raw(tensor, num_values // block_values * block_bytes)
        out = torch.empty(num_values, dtype=dtype)
        step_values = _VALUES_AT_ONCE // block_values * block_values
        for start in range(0, num_values, step_values):
            end = min(start + step_values, num_values)
            part = data[start // block_values * block_bytes : end // block_values * block_bytes]
            try:
                values = dequantize(part.reshape(1, -1), kind)
            except NotImplementedError:
                raise ModelError(
                    f"{self.where()}: tensor {name} is stored as {kind.name}, which is not read."
                ) from None
            out[start:end] = torch.from_numpy(np.array(values, np.float32).reshape(-1))
        return out.view(tensor.shape)
