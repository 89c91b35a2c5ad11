"""The canonical weights of a model (kernels/base.py), read from its files tensor by tensor."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch

from remora.deployments.models.model_spec import ModelSpec
from remora.deployments.models.weight_map import CanonicalWeight, Naming, weight_map
from remora.kernels.grouped import INPUT_GROUP, GroupedPrecision, GroupedTensor, group_rows, stack_rows
from remora.platform.base.errors import ModelError

#: Of a matrix, scales and minimums included; what a file holds as fewer or more bits of integers stays that.
_MATRIX_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / INPUT_GROUP, "int4": 0.5 + 4 / INPUT_GROUP}


class TensorSource(Protocol):
    """Tensors of one model's files by name."""

    #: How these files call the weights.
    naming: Naming
    #: Whether q and k rows hold rope's pairs side by side (GGUF's llama) instead of in halves.
    interleaved: bool

    def where(self) -> str:
        """The folder or file, for messages."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the files, from their headers."""
        ...

    def ignorable(self, name: str) -> bool:
        """Whether a tensor that no weight needs may be left out (saved buffers)."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, converted. Raises ModelError when its stored type cannot be read."""
        ...

    def grouped_precision(self, name: str) -> GroupedPrecision | None:
        """What `read_grouped` gives; None for a tensor that is not stored in groups of integers."""
        ...

    def read_grouped(self, name: str) -> GroupedTensor | None:
        """One tensor exactly as it is stored, or None. Raises ModelError when the file ends before it."""
        ...


class CanonicalWeights(Mapping[str, "torch.Tensor | GroupedTensor"]):
    """Reads, fuses and converts each weight when it is asked for, and keeps none: a decoder that packs weight by weight
    never has more than one unpacked. A weight that is still in use somewhere is handed out again, not read twice.

    Vectors (norms, biases) and rope_inv_freq are fp32. Matrices are fp32 for "fp32", bf16 for "bf16", and grouped
    tensors for "int8" and "int4": what the file holds in groups of integers is taken over exactly, be it of the one or
    the other, and everything else is quantised from fp32. The embedding, whose rows are looked up, is bf16 for those.
    """

    def __init__(self, spec: ModelSpec, source: TensorSource, progress: Callable[[str], None] | None = None) -> None:
        """Raises ModelError, naming the tensors, when the files do not hold exactly the weights of `spec`."""
        self._source = source
        self._precision = spec.shape.weights
        self._map = weight_map(spec.shape, source.naming, tied=spec.tied)
        self._rope_inv_freq = torch.tensor(spec.rope_inv_freq, dtype=torch.float64).to(torch.float32)
        self._alive: weakref.WeakValueDictionary[str, torch.Tensor | GroupedTensor] = weakref.WeakValueDictionary()
        self._progress = progress
        self._num_read = 0
        self._check(spec.tied)

    def __getitem__(self, name: str) -> torch.Tensor | GroupedTensor:
        if name == "rope_inv_freq":
            return self._rope_inv_freq
        weight = self._map[name]
        found = self._alive.get(name)
        if found is None:
            found = self._alive[name] = self._read(name, weight)
            self._num_read += 1
            if self._progress is not None and self._num_read % max(1, len(self._map) // 4) == 0:
                self._progress(f"weights: {min(self._num_read, len(self._map))} of {len(self._map)} read")
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._map
        yield "rope_inv_freq"

    def __len__(self) -> int:
        return len(self._map) + 1

    def num_bytes(self, only: Iterable[str] | None = None) -> int:
        """Memory that the weights take once loaded in their precision; `only` some of them, each as a matrix once."""
        if only is not None:
            return math.ceil(sum(self._bytes_of(name, self._map[name]) for name in only if name in self._map))
        total = sum(self._bytes_of(name, weight) for name, weight in self._map.items())
        if "lm_head" not in self._map:
            # The tied head is packed for products beside the embedding, whose rows are looked up.
            total += self._map["embed"].num_values * _MATRIX_BYTES[self._precision]
        return math.ceil(total)

    def num_exact(self) -> int:
        """Matrices that are taken over from the file exactly, of an int8 or int4 model."""
        return sum(
            all(self._source.grouped_precision(piece.name) is not None for piece in weight.pieces)
            for weight in self._map.values()
            if self._is_grouped(weight)
        )

    def _is_grouped(self, weight: CanonicalWeight) -> bool:
        return weight.kind == "matrix" and self._precision in ("int8", "int4")

    def _own_precision(self, name: str) -> GroupedPrecision:
        """What a matrix becomes that is quantised here. Every prediction goes through the head: it keeps eight bits."""
        return "int4" if self._precision == "int4" and name != "lm_head" else "int8"

    def _bytes_of(self, name: str, weight: CanonicalWeight) -> float:
        if not self._is_grouped(weight):
            return weight.num_values * self._dtype(weight).itemsize
        kinds = [self._source.grouped_precision(piece.name) or self._own_precision(name) for piece in weight.pieces]
        return weight.num_values * _MATRIX_BYTES["int4" if all(kind == "int4" for kind in kinds) else "int8"]

    def _dtype(self, weight: CanonicalWeight) -> torch.dtype:
        return torch.float32 if weight.kind == "vector" or self._precision == "fp32" else torch.bfloat16

    def _read(self, name: str, weight: CanonicalWeight) -> torch.Tensor | GroupedTensor:
        return self._grouped(weight, self._own_precision(name)) if self._is_grouped(weight) else self._build(weight)

    def _grouped(self, weight: CanonicalWeight, precision: GroupedPrecision) -> GroupedTensor:
        parts = []
        for piece in weight.pieces:
            part = self._source.read_grouped(piece.name)
            if part is None:
                part = group_rows(self._source.read(piece.name, torch.float32), precision)
            if self._source.interleaved and piece.num_rope_heads:
                order = torch.arange(piece.shape[0]).view(piece.num_rope_heads, -1, 2)
                part = part.permuted(order.transpose(1, 2).reshape(-1))
            parts.append(part)
        return parts[0] if len(parts) == 1 else stack_rows(parts)

    def _build(self, weight: CanonicalWeight) -> torch.Tensor:
        dtype = self._dtype(weight)
        parts = []
        for piece in weight.pieces:
            part = self._source.read(piece.name, dtype)
            if self._source.interleaved and piece.num_rope_heads:
                # Undoes llama.cpp's permutation (convert_hf_to_gguf.py: LlamaModel.permute).
                pairs = part.view(piece.num_rope_heads, -1, 2, *part.shape[1:])
                part = pairs.transpose(1, 2).reshape(part.shape)
            parts.append(part)
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _check(self, tied: bool) -> None:
        shapes, where = self._source.shapes(), self._source.where()
        needed = {piece.name: piece.shape for weight in self._map.values() for piece in weight.pieces}
        missing = [name for name in needed if name not in shapes]
        if missing:
            raise ModelError(f"{where}: {_listed(missing)} missing from the weights.")
        allowed_head = self._source.naming.names["lm_head"] if tied else None
        unexpected = [
            name for name in shapes if name not in needed and name != allowed_head and not self._source.ignorable(name)
        ]
        if unexpected:
            raise ModelError(f"{where}: {_listed(unexpected)} unexpected: the config does not describe these weights.")
        for name, shape in needed.items():
            if tuple(shapes[name]) != shape:
                raise ModelError(f"{where}: tensor {name} has shape {tuple(shapes[name])}, the config says {shape}.")


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown}{more} are"
