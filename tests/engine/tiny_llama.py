"""A tiny random model of the Llama family on a real decoder."""

from __future__ import annotations

from functools import cache

import torch
from engine_support import VOCAB, FakeModel

from remora.kernels.base import Decoder, DecoderShape, Weights
from remora.kernels.cuda.decoder import CudaDecoder
from remora.kernels.cuda.runtime import Runtime
from remora.kernels.registry import Backend, make_decoder
from remora.namespaces.geometry import KVGeometry, LayerGroup

SHAPE = DecoderShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    rms_norm_eps=1e-5,
    weights="fp32",
)
LLAMA_GEOMETRY = KVGeometry(
    groups=(LayerGroup(num_layers=2, num_kv_heads=2, head_dim=16, k_precision="fp32", v_precision="fp32"),),
    block_tokens=16,
    rope="theta=10000.0",
)


@cache
def random_weights() -> Weights:
    """Large enough for attention to be far from uniform."""
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * 0.18

    weights: dict[str, torch.Tensor] = {
        "embed": normal(VOCAB, 64) * 4,
        "lm_head": normal(VOCAB, 64),
        "final_norm": 1 + normal(64),
        "rope_inv_freq": 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16),
    }
    for layer in range(2):
        weights |= {
            f"layers.{layer}.input_norm": 1 + normal(64),
            f"layers.{layer}.post_norm": 1 + normal(64),
            f"layers.{layer}.qkv": normal((4 + 2 * 2) * 16, 64),
            f"layers.{layer}.o": normal(64, 4 * 16),
            f"layers.{layer}.gate_up": normal(2 * 96, 64),
            f"layers.{layer}.down": normal(64, 96),
        }
    return weights


def tiny_llama(backend: Backend) -> FakeModel:
    num_threads = 2 if backend == "native" else 1
    return _on(make_decoder(SHAPE, dict(random_weights()), LLAMA_GEOMETRY, num_threads=num_threads, backend=backend))


def tiny_llama_on(runtime: Runtime) -> FakeModel:
    """On a GPU, or what stands for one."""
    return _on(CudaDecoder(SHAPE, random_weights(), LLAMA_GEOMETRY, runtime, attention="cuda"))


def _on(decoder: Decoder) -> FakeModel:
    inv_freq = random_weights()["rope_inv_freq"].numpy()
    return FakeModel(name=f"tiny llama, {decoder.name}", decoder=decoder, rope_inv_freq=inv_freq)
