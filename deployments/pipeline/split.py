"""How many layers each stage of a pipeline gets, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from remora.kernels.base import DecoderShape
from remora.kernels.batch import StepBatch
from remora.kernels.stages import stage_decoder
from remora.kernels.weight_sizes import weight_sizes
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base.errors import ConfigError

#: What layers are timed with: a request of 512 tokens of prompt and 128 of answer, as part of a batch. The head has
#: work only for the answer: by decoding alone its stage would get too few layers to keep up with prompts.
_PROMPT_ROWS, _NUM_PROMPT_STEPS = 128, 4
_DECODE_ROWS, _NUM_DECODE_STEPS = 16, 8
_TIMED_TIMES = 3


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
    """Times a layer, the embedding and the head of this shape on this machine, without the model's weights: seconds for
    one request. All layers of a shape cost the same.

    Takes some seconds of a large model, and the memory of one layer and one head.
    """
    one = replace(shape, num_layers=1)
    layer_s = _request_s(replace(one, has_embedding=False, has_head=False), num_threads)
    return LayerCosts(
        layer_s=(layer_s,) * shape.num_layers,
        embedding_s=max(0.0, _request_s(replace(one, has_head=False), num_threads) - layer_s),
        head_s=max(0.0, _request_s(replace(one, has_embedding=False), num_threads) - layer_s),
    )


def _request_s(shape: DecoderShape, num_threads: int) -> float:
    import torch

    from remora.kernels.registry import make_decoder

    group = LayerGroup(num_layers=1, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    geometry = KVGeometry(groups=(group,), block_tokens=16)
    weights = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in weight_sizes(shape).items()}
    decoder = stage_decoder(make_decoder(shape, weights, geometry, num_threads=num_threads))
    memory = _Memory(geometry, _DECODE_ROWS)
    prompt, decode = (StepBatch(max_tokens=_PROMPT_ROWS, max_sequences=_DECODE_ROWS, max_blocks=8) for _ in range(2))
    prompt.add([0] * _PROMPT_ROWS, first_position=0, blocks=list(range(_PROMPT_ROWS // 16)), logits="none")
    for row in range(_DECODE_ROWS):
        decode.add([0], first_position=0, blocks=[row])

    def shortest_s(batch: StepBatch) -> float:
        shape_TH = (batch.num_tokens, shape.hidden_size)
        hidden_TH = None if shape.has_embedding else np.zeros(shape_TH, np.float32)
        times_s = []
        for _ in range(_TIMED_TIMES):
            started_s = time.perf_counter()
            decoder.forward_stage(batch, memory, hidden_TH)
            times_s.append(time.perf_counter() - started_s)
        return min(times_s)

    return _NUM_PROMPT_STEPS * shortest_s(prompt) + _NUM_DECODE_STEPS * shortest_s(decode)


class _Memory:
    def __init__(self, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.data = np.zeros(num_blocks * geometry.block_bytes, np.uint8)
