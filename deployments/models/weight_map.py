"""Which tensors of a file make up each canonical weight (kernels/base.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from remora.kernels.base import DecoderShape

#: "matrix": takes the precision of the weights; "embed": never int8 or int4, its rows are looked up; "vector": always
#: fp32.
WeightKind = Literal["matrix", "embed", "vector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of the file; pieces of a weight are stacked in order."""

    name: str
    shape: tuple[int, ...]
    #: Heads of a q or k projection, for files that interleave rope's pairs; 0: not one.
    num_rope_heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalWeight:
    kind: WeightKind
    pieces: tuple[Piece, ...]

    @property
    def num_values(self) -> int:
        total = 0
        for piece in self.pieces:
            count = 1
            for size in piece.shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How a file format calls things; layer names follow `layer.format(i)`, weights and biases end as here."""

    layer: str
    names: Mapping[str, str]


HUGGING_FACE = Naming(
    layer="model.layers.{}.",
    names={
        "embed": "model.embed_tokens.weight",
        "lm_head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
)
GGUF = Naming(
    layer="blk.{}.",
    names={
        "embed": "token_embd.weight",
        "lm_head": "output.weight",
        "final_norm": "output_norm.weight",
        "input_norm": "attn_norm.weight",
        "post_norm": "ffn_norm.weight",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
)


def weight_map(shape: DecoderShape, naming: Naming, *, tied: bool) -> dict[str, CanonicalWeight]:
    """Canonical name → tensors of the file, for every weight but rope_inv_freq, in the order of use.

    The tied head of an int8 or int4 model is a weight of its own: products read integers, look-ups do not.
    """
    names, hidden, inner = naming.names, shape.hidden_size, shape.intermediate_size
    q_size = shape.num_attention_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    weights: dict[str, CanonicalWeight] = {}

    def put(name: str, kind: WeightKind, *pieces: Piece) -> None:
        weights[name] = CanonicalWeight(kind=kind, pieces=pieces)

    def linear(
        prefix: str, name: str, num_in: int, parts: tuple[tuple[str, int, int], ...], *, bias: bool, bias_name: str
    ) -> None:
        """Stacks projections: (name in the file, rows, rope heads)."""
        put(
            prefix + name,
            "matrix",
            *(
                Piece(name=f"{layer}{names[part]}.weight", shape=(rows, num_in), num_rope_heads=heads)
                for part, rows, heads in parts
            ),
        )
        if bias:
            put(
                prefix + bias_name,
                "vector",
                *(
                    Piece(name=f"{layer}{names[part]}.bias", shape=(rows,), num_rope_heads=heads)
                    for part, rows, heads in parts
                ),
            )

    put("embed", "embed", Piece(name=names["embed"], shape=(shape.vocab_size, hidden)))
    for index in range(shape.num_layers):
        layer, prefix = naming.layer.format(index), f"layers.{index}."
        put(prefix + "input_norm", "vector", Piece(name=layer + names["input_norm"], shape=(hidden,)))
        qkv = (
            ("q", q_size, shape.num_attention_heads),
            ("k", kv_size, shape.num_kv_heads),
            ("v", kv_size, 0),
        )
        linear(prefix, "qkv", hidden, qkv, bias=shape.qkv_bias, bias_name="qkv_bias")
        if shape.qk_norm:
            put(prefix + "q_norm", "vector", Piece(name=layer + names["q_norm"], shape=(shape.head_dim,)))
            put(prefix + "k_norm", "vector", Piece(name=layer + names["k_norm"], shape=(shape.head_dim,)))
        linear(prefix, "o", q_size, (("o", hidden, 0),), bias=shape.output_bias, bias_name="o_bias")
        put(prefix + "post_norm", "vector", Piece(name=layer + names["post_norm"], shape=(hidden,)))
        gate_up = (("gate", inner, 0), ("up", inner, 0))
        linear(prefix, "gate_up", hidden, gate_up, bias=shape.mlp_bias, bias_name="gate_up_bias")
        linear(prefix, "down", inner, (("down", hidden, 0),), bias=shape.mlp_bias, bias_name="down_bias")
    put("final_norm", "vector", Piece(name=names["final_norm"], shape=(hidden,)))
    if not tied or shape.weights in ("int8", "int4"):
        head = names["embed" if tied else "lm_head"]
        put("lm_head", "matrix", Piece(name=head, shape=(shape.vocab_size, hidden)))
    return weights
