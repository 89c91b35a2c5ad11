"""Tensors of a GGUF file, one by one: dequantised, or taken over as they are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from remora.deployments.models.gguf_file import GGUFFile
from remora.deployments.models.weight_map import GGUF
from remora.kernels.grouped import INPUT_GROUP, GroupedPrecision, GroupedTensor
from remora.platform.base.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouped:
    """How a group of INPUT_GROUP values is stored: an fp16 scale, maybe an fp16 minimum, then the codes."""

    precision: GroupedPrecision
    group_bytes: int
    has_minimum: bool = False

    @property
    def codes_at(self) -> int:
        return 4 if self.has_minimum else 2


#: GGML's Q4_0 (its codes stand for -8..7), Q4_1 and Q8_0.
_GROUPED = {
    2: _Grouped(precision="int4", group_bytes=18),
    3: _Grouped(precision="int4", group_bytes=20, has_minimum=True),
    8: _Grouped(precision="int8", group_bytes=34),
}
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

    def grouped_precision(self, name: str) -> GroupedPrecision | None:
        found = _GROUPED.get(self._file.tensors[name].type_no)
        return None if found is None or self._file.tensors[name].shape[-1] % INPUT_GROUP else found.precision

    def read_grouped(self, name: str) -> GroupedTensor | None:
        if self.grouped_precision(name) is None:
            return None
        tensor = self._file.tensors[name]
        kind = _GROUPED[tensor.type_no]
        num_rows, num_inputs = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        num_groups = num_rows * num_inputs // INPUT_GROUP
        groups = self._file.raw(tensor, num_groups * kind.group_bytes).reshape(num_groups, kind.group_bytes)

        def half(first_byte: int) -> torch.Tensor:
            values = np.ascontiguousarray(groups[:, first_byte : first_byte + 2]).view(np.float16)
            return torch.from_numpy(values).view(num_rows, -1)

        packed = torch.from_numpy(np.ascontiguousarray(groups[:, kind.codes_at :]))
        if kind.precision == "int8":
            codes = packed.view(torch.int8)
        else:
            codes = torch.cat((packed & 15, packed >> 4), dim=1).view(torch.int8)
        scale = half(0)
        minimum = half(2) if kind.has_minimum else -8 * scale if kind.precision == "int4" else None
        return GroupedTensor(
            precision=kind.precision, codes_OI=codes.view(num_rows, num_inputs), scale_OG=scale, minimum_OG=minimum
        )

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
