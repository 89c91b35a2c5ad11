"""A stage of a model with random weights, and the sizes of the bench of pipelines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from bench_native import Memory

from remora.deployments.pipeline.pipeline_decoder import PipelineLimits
from remora.kernels.base import DecoderShape
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.stages import StagePart, StageWeights
from remora.kernels.weight_sizes import weight_sizes
from remora.namespaces.geometry import KVGeometry, LayerGroup

BLOCK_TOKENS = 32
CONTEXT = 256
BATCH = 16
PROMPT = 2048
STEP_TOKENS = 512
MAX_BLOCKS = PROMPT // BLOCK_TOKENS + 1
NUM_BLOCKS = max(MAX_BLOCKS, BATCH * (CONTEXT // BLOCK_TOKENS + 2))


class RandomWeights(Mapping[str, torch.Tensor]):
    """Made when they are asked for; the same in every process."""

    def __init__(self, shape: DecoderShape) -> None:
        self._sizes = weight_sizes(shape)
        rows = torch.Generator().manual_seed(0)
        self._noise = torch.randn(1 << 20, generator=rows).to(torch.bfloat16)

    def __getitem__(self, name: str) -> torch.Tensor:
        size = self._sizes[name]
        if name == "rope_inv_freq":
            return 10000.0 ** -(torch.arange(0, 2 * size[0], 2) / (2 * size[0]))
        if len(size) == 1:
            return torch.ones(size)
        # Noise again and again, from a place of its own: a gigabyte of new noise would take longer than the bench.
        count = math.prod(size)
        shifted = self._noise.roll(sum(name.encode()) * 977)
        return shifted.repeat(-(-count // len(shifted)))[:count].view(size) * size[-1] ** -0.5

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


def make_geometry(shape: DecoderShape) -> KVGeometry:
    group = LayerGroup(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    return KVGeometry(groups=(group,), block_tokens=BLOCK_TOKENS)


def make_limits(shape: DecoderShape, num_micro_tokens: int) -> PipelineLimits:
    return PipelineLimits(
        num_stages=2,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_blocks=MAX_BLOCKS,
        max_num_seqs=BATCH,
        max_step_tokens=STEP_TOKENS,
        max_micro_tokens=num_micro_tokens,
    )


@dataclass(frozen=True)
class Stage:
    """One stage's decoder and arena."""

    part: StagePart
    decoder: NativeDecoder
    memory: Memory

    @staticmethod
    def make(shape: DecoderShape, split: tuple[int, ...], stage: int, num_threads: int) -> Stage:
        part = StagePart(split=split, stage=stage)
        geometry = part.geometry_of(make_geometry(shape))
        decoder = NativeDecoder(part.shape_of(shape), StageWeights(RandomWeights(shape), part), geometry, num_threads)
        return Stage(part, decoder, Memory(geometry, NUM_BLOCKS))
