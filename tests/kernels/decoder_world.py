"""Small decoders of the Llama family with random weights, and one sequence that runs through them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from remora.kernels.base import Decoder, DecoderShape, KVMemory
from remora.kernels.batch import StepBatch
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base.errors import KernelError

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

LLAMA = DecoderShape(
    num_layers=2,
    hidden_size=90,
    intermediate_size=150,
    num_attention_heads=3,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=211,
    rms_norm_eps=1e-5,
    weights="fp32",
)


class Memory:
    """A private arena full of NaN, as stale bytes may be."""

    def __init__(self, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.data: NDArray[np.uint8] = np.full(num_blocks * geometry.block_bytes, 0xFF, np.uint8)


def make_geometry(shape: DecoderShape, kv: str = "fp32", block_tokens: int = 16) -> KVGeometry:
    k_precision, _, v_precision = kv.partition("/")
    group = LayerGroup(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        k_precision=k_precision,  # type: ignore[arg-type]
        v_precision=v_precision or k_precision,  # type: ignore[arg-type]
    )
    return KVGeometry(groups=(group,), block_tokens=block_tokens)


def make_weights(shape: DecoderShape, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """Random weights that bf16 holds exactly, so that precisions differ by their arithmetic alone."""
    generator = torch.Generator().manual_seed(5)

    def normal(*size: int, mean: float = 0.0, std: float = 0.1) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * std + mean).to(torch.bfloat16)

    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q_size = shape.num_attention_heads * dim
    qkv_size = q_size + 2 * shape.num_kv_heads * dim
    weights = {
        "embed": normal(shape.vocab_size, hidden, std=1.0),
        "final_norm": normal(hidden, mean=1.0, std=0.3),
        "rope_inv_freq": 10000.0 ** -(torch.arange(0, dim, 2) / dim),
    }
    if not tied:
        weights["lm_head"] = normal(shape.vocab_size, hidden)
    for index in range(shape.num_layers):
        layer = {
            "input_norm": normal(hidden, mean=1.0, std=0.3),
            "post_norm": normal(hidden, mean=1.0, std=0.3),
            "qkv": normal(qkv_size, hidden),
            "o": normal(hidden, q_size),
            "gate_up": normal(2 * inner, hidden),
            "down": normal(hidden, inner),
        }
        if shape.qkv_bias:
            layer["qkv_bias"] = normal(qkv_size)
        if shape.output_bias:
            layer["o_bias"] = normal(hidden)
        if shape.mlp_bias:
            layer["gate_up_bias"], layer["down_bias"] = normal(2 * inner), normal(hidden)
        if shape.qk_norm:
            layer["q_norm"], layer["k_norm"] = normal(dim, mean=1.0, std=0.3), normal(dim, mean=1.0, std=0.3)
        weights.update({f"layers.{index}.{name}": tensor for name, tensor in layer.items()})
    return weights


def run(decoder: Decoder, memory: Memory, tokens: Int32, blocks: Int32, ends: list[int]) -> Float32:
    """All logits of one sequence whose prompt is cut at `ends`."""
    batch = StepBatch(max_tokens=len(tokens), max_sequences=1, max_blocks=len(blocks))
    parts, start = [], 0
    for end in ends:
        batch.clear()
        batch.add(tokens[start:end], first_position=start, blocks=blocks, logits="all")
        parts.append(decoder.forward(batch, memory).copy())
        start = end
    return np.concatenate(parts)


def random_tokens(shape: DecoderShape, count: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(0, shape.vocab_size, count).astype(np.int32)


def assert_bad_steps_are_refused(
    decoder: Decoder, memory: KVMemory, other_memory: KVMemory, batch: StepBatch, *, times: int = 1
) -> None:
    """Steps that a decoder of LLAMA cannot run. `memory` has 4 blocks of 16 tokens, `other_memory` another geometry;
    `times`: how often each step with wrong numbers is tried."""
    for tokens, blocks, message in [([5] * 17, [1, 4], "block 4"), ([5], [-1], "block -1"), ([211], [0], "vocabulary")]:
        for _ in range(times):
            batch.clear()
            batch.add([1], first_position=0, blocks=[0])
            batch.add(tokens, first_position=0, blocks=blocks)
            with pytest.raises(KernelError, match=message):
                decoder.forward(batch, memory)
    for spoil, message in [
        (lambda: batch.positions_T.__setitem__(1, 7), "positions"),
        (lambda: batch.logit_rows_R.__setitem__(0, 2), "logit row"),
        (lambda: batch.context_len_S.__setitem__(1, 40), "positions"),
        (lambda: batch.query_start_S.__setitem__(2, 1), "query_start"),
    ]:
        batch.clear()
        batch.add([1], first_position=0, blocks=[0])
        batch.add([2], first_position=0, blocks=[1])
        spoil()
        with pytest.raises(KernelError, match=message):
            decoder.forward(batch, memory)
    batch.clear()
    with pytest.raises(KernelError, match="without tokens"):
        decoder.forward(batch, memory)
    batch.add([1], first_position=0, blocks=[0])
    with pytest.raises(KernelError, match="geometry"):
        decoder.forward(batch, other_memory)
