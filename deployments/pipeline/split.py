"""How many layers each stage of a pipeline gets, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np

from remora.kernels.base import DecoderShape
from remora.kernels.batch import StepBatch
from remora.kernels.stages import stage_decoder
from remora.kernels.weight_sizes import weight_sizes
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base.errors import ConfigError

#: Rows of the step that layers are timed with: a decoding batch.
_TIMED_ROWS = 16
_TIMED_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Seconds of one step on one device."""

    layer_s: tuple[float, ...]
    #: Before the first layer, and norm, head and logits behind the last.
    embedding_s: float = 0.0
    head_s: float = 0.0


def balanced_split(costs: Sequence[LayerCosts]) -> tuple[int, ...]:
    """Layers of each stage; `costs` are of the same layers on the device of each. Every stage has at least one.

    The longest stage is as short as can be; of splits that are equal in this, one whose earlier stages are shorter.
    Raises ConfigError when there are fewer layers than stages.
    """
    num_stages, num_layers = len(costs), len(costs[0].layer_s)
    if num_layers < num_stages:
        raise ConfigError(f"pipeline_stages: {num_stages} stages for {num_layers} layers; at most one stage a layer")
    sums = [[0.0, *accumulate(cost.layer_s)] for cost in costs]

    def stage_s(stage: int, begin: int, end: int) -> float:
        extra_s = costs[stage].embedding_s if stage == 0 else 0.0
        if stage == num_stages - 1:
            extra_s += costs[stage].head_s
        return sums[stage][end] - sums[stage][begin] + extra_s

    # best[end]: the longest of the stages so far, and their ends, when they have layers [0, end).
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(stage + 1, num_layers - (num_stages - 1 - stage) + 1):
            following[end] = min(
                (max(longest_s, stage_s(stage, begin, end)), (*ends, end))
                for begin, (longest_s, ends) in best.items()
                if begin < end
            )
        best = following
    ends = best[num_layers][1]
    return tuple(int(end - begin) for begin, end in zip((0, *ends[:-1]), ends, strict=True))


def measure_costs(shape: DecoderShape, num_threads: int) -> LayerCosts:
    """Times a layer, the embedding and the head of this shape on this machine, without the model's weights.

    All layers of a shape cost the same. Takes about a second and the memory of one layer and one head.
    """
    one = replace(shape, num_layers=1)
    timed = partial(_step_s, num_threads=num_threads)
    layer_s = timed(replace(one, has_embedding=False, has_head=False))
    return LayerCosts(
        layer_s=(layer_s,) * shape.num_layers,
        embedding_s=max(0.0, timed(replace(one, has_head=False)) - layer_s),
        head_s=max(0.0, timed(replace(one, has_embedding=False)) - layer_s),
    )


def _step_s(shape: DecoderShape, *, num_threads: int) -> float:
    """The shortest of some steps."""
    import torch

    from remora.kernels.registry import make_decoder

    group = LayerGroup(num_layers=1, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    geometry = KVGeometry(groups=(group,), block_tokens=16)
    weights = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in weight_sizes(shape).items()}
    decoder = stage_decoder(make_decoder(shape, weights, geometry, num_threads=num_threads))
    memory = _Memory(geometry, _TIMED_ROWS)
    batch = StepBatch(max_tokens=_TIMED_ROWS, max_sequences=_TIMED_ROWS, max_blocks=1)
    for row in range(_TIMED_ROWS):
        batch.add([0], first_position=0, blocks=[row])
    hidden_TH = None if shape.has_embedding else np.zeros((_TIMED_ROWS, shape.hidden_size), np.float32)
    times_s = []
    for _ in range(_TIMED_STEPS):
        started_s = time.perf_counter()
        decoder.forward_stage(batch, memory, hidden_TH)
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


class _Memory:
    def __init__(self, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.data = np.zeros(num_blocks * geometry.block_bytes, np.uint8)
