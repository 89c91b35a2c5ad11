"""Tensors of a Hugging Face folder: model.safetensors, or shards with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from remora.deployments.models.weight_files import weight_files
from remora.deployments.models.weight_map import HUGGING_FACE
from remora.kernels.grouped import GroupedPrecision, GroupedTensor
from remora.platform.base.errors import ModelError

_DTYPES = {"F32", "F16", "BF16", "F64"}


class SafetensorsSource:
    """A canonical_weights.TensorSource. Files are mapped; a tensor is copied when it is read."""

    naming = HUGGING_FACE
    interleaved = False

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when the folder has no whole set of safetensors files."""
        self._folder = folder
        self.files = weight_files(folder)
        self._open: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: cannot be read: {error}") from None
            for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name in self._open:
                    raise ModelError(f"{path}: tensor {name} is in two files.")
                part = file.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise ModelError(
                        f"{path}: tensor {name} is stored as {part.get_dtype()}; {', '.join(sorted(_DTYPES))} are read."
                    )
                self._open[name] = file
                self._shapes[name] = tuple(part.get_shape())

    def where(self) -> str:
        return str(self._folder)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def ignorable(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq")

    def grouped_precision(self, name: str) -> GroupedPrecision | None:
        return None  # values are stored one by one

    def read_grouped(self, name: str) -> GroupedTensor | None:
        return None

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._open[name].get_tensor(name)
        return tensor.to(dtype)
