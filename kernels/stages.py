"""Parts of a model's layers: the shape, the KV geometry and the weights of one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from remora.kernels.base import Decoder, DecoderShape, StageDecoder, Weights
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError

if TYPE_CHECKING:
    import torch

    from remora.kernels.grouped import GroupedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Stage number `stage` of a model whose stages have `split[0]`, `split[1]`, ... layers."""

    split: tuple[int, ...]
    stage: int

    def __post_init__(self) -> None:
        if not 0 <= self.stage < len(self.split) or min(self.split) < 1:
            raise ValueError(f"no stage {self.stage} with layers of its own in a split into {self.split}")

    @property
    def num_layers(self) -> int:
        return self.split[self.stage]

    @property
    def first_layer(self) -> int:
        return sum(self.split[: self.stage])

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.split) - 1

    @property
    def is_whole(self) -> bool:
        return len(self.split) == 1

    def __str__(self) -> str:
        """Which layers of which split: part of what makes KV interchangeable."""
        ends = "|".join(str(end) for end in accumulate(self.split))
        return f"stage {self.stage} of layers 0|{ends}"

    def shape_of(self, whole: DecoderShape) -> DecoderShape:
        """Raises ValueError when the split is of another number of layers."""
        if sum(self.split) != whole.num_layers:
            raise ValueError(f"a split into {self.split} is of {sum(self.split)} layers, not {whole.num_layers}")
        return replace(whole, num_layers=self.num_layers, has_embedding=self.is_first, has_head=self.is_last)

    def geometry_of(self, whole: KVGeometry) -> KVGeometry:
        """Of this stage's layers, which must be of one group."""
        if len(whole.groups) != 1 or whole.num_layers != sum(self.split):
            raise ValueError(f"a split into {self.split} does not fit {whole}")
        group = msgspec.structs.replace(whole.groups[0], num_layers=self.num_layers)
        return msgspec.structs.replace(whole, groups=(group,))


class StageWeights(Mapping[str, "torch.Tensor | GroupedTensor"]):
    """Weights of one stage as its decoder names them, taken from those of the whole model when they are asked for.

    Layers are numbered from 0. A tied head is the embedding under its own name where the embedding is not.
    """

    def __init__(self, whole: Weights, part: StagePart) -> None:
        self._whole = whole
        self._sources = {name: source for source in whole if (name := _name_in_stage(source, part)) is not None}
        if part.is_last and not part.is_first and "lm_head" not in whole:
            self._sources["lm_head"] = "embed"

    def __getitem__(self, name: str) -> torch.Tensor | GroupedTensor:
        return self._whole[self._sources[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def source_of(self, name: str) -> str:
        """What the whole model calls the weight."""
        return self._sources[name]


def _name_in_stage(name: str, part: StagePart) -> str | None:
    if name == "embed":
        return name if part.is_first else None
    if name in ("lm_head", "final_norm"):
        return name if part.is_last else None
    if not name.startswith("layers."):
        return name
    _, number, kind = name.split(".")
    layer = int(number) - part.first_layer
    return f"layers.{layer}.{kind}" if 0 <= layer < part.num_layers else None


def stage_decoder(decoder: Decoder) -> StageDecoder:
    """The decoder as a stage. Raises KernelError for one that computes whole models only."""
    if not hasattr(decoder, "forward_stage"):
        raise KernelError(f"{decoder.name} computes whole models, no stages of a pipeline")
    stage: StageDecoder = decoder  # type: ignore[assignment]
    return stage
