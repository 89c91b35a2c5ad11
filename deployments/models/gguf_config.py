"""A GGUF file's metadata → the own decoder's shape and rope."""

from __future__ import annotations

import math

from remora.deployments.models.gguf_file import GGUFFile
from remora.deployments.models.hf_config import default_inv_freq
from remora.deployments.models.model_spec import ModelSpec, served_context_len
from remora.deployments.models.refusals import refuse
from remora.kernels.base import DecoderShape, WeightPrecision
from remora.platform.base.errors import ModelError

#: GGUF's "llama" covers Llama, Mistral and SmolLM.
OWN_ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3"})
#: Metadata that changes the maths of the llama architecture (Granite's multipliers, experts, windows).
_FOREIGN_KEYS = (
    "expert_count",
    "attention.sliding_window",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.max_alibi_bias",
)


def gguf_spec(name: str, file: GGUFFile, *, weights: WeightPrecision, max_model_len: int | None) -> ModelSpec:
    """Shape, rope and context of the file's model. Raises ModelError, naming what cannot be served right."""
    architecture = file.architecture
    if architecture not in OWN_ARCHITECTURES:
        refuse(
            name,
            f"GGUF {architecture or 'without an architecture'}",
            f"GGUF files of {', '.join(sorted(OWN_ARCHITECTURES))} are; use the model's Hugging Face folder.",
        )
    for key in _FOREIGN_KEYS:
        if file.get(f"{{arch}}.{key}"):
            refuse(name, f"GGUF {architecture}", f"its metadata sets {architecture}.{key}, which is not served.")

    def number(key: str) -> int:
        value = file.get(f"{{arch}}.{key}")
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{file.path}: {architecture}.{key} is missing or not a positive number ({value!r}).")
        return value

    num_heads = number("attention.head_count")
    hidden_size = number("embedding_length")
    head_dim = int(file.get("{arch}.attention.key_length") or hidden_size // num_heads)
    value_dim = int(file.get("{arch}.attention.value_length") or head_dim)
    if value_dim != head_dim or file.get("{arch}.rope.dimension_count", head_dim) != head_dim:
        refuse(name, f"GGUF {architecture}", "its keys, values and rotation differ in size; that is not served.")
    eps = file.get("{arch}.attention.layer_norm_rms_epsilon")
    if not isinstance(eps, float):
        raise ModelError(f"{file.path}: {architecture}.attention.layer_norm_rms_epsilon is missing.")
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise ModelError(f"{file.path}: the tensor token_embd.weight is missing.")
    theta = float(file.get("{arch}.rope.freq_base", 10000.0))
    inv_freq, rope = _rope(name, file, theta, head_dim)
    tensors = file.tensors
    shape = DecoderShape(
        num_layers=number("block_count"),
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_attention_heads=num_heads,
        num_kv_heads=int(file.get("{arch}.attention.head_count_kv") or num_heads),
        head_dim=head_dim,
        vocab_size=embed.shape[0],
        # The metadata is fp32; transformers' configs hold the decimal that was meant.
        rms_norm_eps=float(f"{eps:.7g}"),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        weights=weights,
    )
    return ModelSpec(
        architecture=architecture,
        shape=shape,
        rope_inv_freq=inv_freq,
        rope=rope,
        tied="output.weight" not in tensors,
        max_model_len=served_context_len(number("context_length"), max_model_len),
    )


def _rope(name: str, file: GGUFFile, theta: float, head_dim: int) -> tuple[tuple[float, ...], str]:
    inv_freq = default_inv_freq(theta, head_dim)
    kind = file.get("{arch}.rope.scaling.type") or "none"
    factor = float(file.get("{arch}.rope.scaling.factor") or file.get("{arch}.rope.scale_linear") or 1.0)
    rope = f"theta={theta}"
    if kind == "linear" or (kind == "none" and factor != 1.0):
        inv_freq = tuple(value / factor for value in inv_freq)
        rope += f" linear{factor}"
    elif kind != "none":
        refuse(name, f"GGUF {file.architecture}", f"its rope scaling {kind!r} is not served from GGUF files.")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        # Llama 3's rule, already worked out by the converter: one divisor a frequency.
        if factors.type_no != 0 or math.prod(factors.shape) != head_dim // 2:
            raise ModelError(f"{file.path}: the tensor rope_freqs.weight is not {head_dim // 2} fp32 numbers.")
        values = file.raw(factors, 4 * (head_dim // 2)).view("<f4").tolist()
        inv_freq = tuple(value / divisor for value, divisor in zip(inv_freq, values, strict=True))
        rope += f" factors{values}"
    return inv_freq, rope
