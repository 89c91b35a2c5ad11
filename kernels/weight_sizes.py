"""The weights of a shape by name, and their sizes: kernels.base.Weights without the values."""

from __future__ import annotations

from remora.kernels.base import DecoderShape


def weight_sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Of a model whose head is not tied; of a stage, what that stage has."""
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q_size = shape.num_attention_heads * dim
    qkv_size = q_size + 2 * shape.num_kv_heads * dim
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "post_norm": (hidden,),
        "qkv": (qkv_size, hidden),
        "o": (hidden, q_size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    if shape.qkv_bias:
        layer["qkv_bias"] = (qkv_size,)
    if shape.output_bias:
        layer["o_bias"] = (hidden,)
    if shape.mlp_bias:
        layer |= {"gate_up_bias": (2 * inner,), "down_bias": (hidden,)}
    if shape.qk_norm:
        layer |= {"q_norm": (dim,), "k_norm": (dim,)}
    sizes: dict[str, tuple[int, ...]] = {"rope_inv_freq": (dim // 2,)}
    if shape.has_embedding:
        sizes["embed"] = (shape.vocab_size, hidden)
    for index in range(shape.num_layers):
        sizes |= {f"layers.{index}.{name}": size for name, size in layer.items()}
    if shape.has_head:
        sizes |= {"final_norm": (hidden,), "lm_head": (shape.vocab_size, hidden)}
    return sizes
