"""A Hugging Face config → the own decoder's shape and rope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from remora.deployments.models.model_spec import ModelSpec
from remora.deployments.models.refusals import refuse
from remora.kernels.base import DecoderShape, WeightPrecision
from remora.platform.base.errors import ModelError

#: Model types whose maths is the own decoder's; SmolLM and SmolLM2 are of type llama.
OWN_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def read_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The folder's config as transformers completes it. Raises ModelError for one that transformers does not know."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises KeyError, ValueError, OSError and its validators' errors
        raise ModelError(f"{folder}: the config cannot be read: {str(error).strip().splitlines()[0]}") from None


def runs_natively(config: Any) -> bool:
    """Whether the own decoder computes exactly this config."""
    return config.model_type in OWN_MODEL_TYPES and config.hidden_act == "silu" and _full_rotation(config)


def decoder_spec(name: str, config: Any, *, weights: WeightPrecision, max_model_len: int) -> ModelSpec:
    """Shape, rope and geometry for the own decoder; `config` has passed refusals.check_servable.

    Raises ModelError for a config that the own decoder does not compute exactly.
    """
    architecture = str(config.model_type)
    if not runs_natively(config):
        refuse(
            name,
            architecture,
            f"the own decoder runs {', '.join(sorted(OWN_MODEL_TYPES))} with SiLU and full rotation; "
            "set `backend: transformers` (slower).",
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, factor = rope_frequencies(name, config, max_model_len)
    bias = bool(getattr(config, "attention_bias", False))
    shape = DecoderShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        qk_norm=architecture == "qwen3",
        qkv_bias=architecture == "qwen2" or (architecture in ("llama", "qwen3") and bias),
        output_bias=architecture in ("llama", "qwen3") and bias,
        mlp_bias=architecture == "llama" and bool(config.mlp_bias),
        rope_attention_factor=factor,
        weights=weights,
    )
    return ModelSpec(
        architecture=architecture,
        shape=shape,
        rope_inv_freq=inv_freq,
        rope=rope_text(config),
        tied=bool(config.tie_word_embeddings),
        max_model_len=max_model_len,
    )


def rope_frequencies(name: str, config: Any, context_len: int) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the factor on cos and sin, by transformers' own rules. Raises ModelError by name."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return default_inv_freq(float(parameters["rope_theta"]), head_dim), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        refuse(name, str(config.model_type), f"its rope scaling {kind!r} is unknown.")
    # refusals.check_servable has made sure that rules which depend on the length stay at their start.
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=1)
    return tuple(inv_freq.double().tolist()), float(factor)


def default_inv_freq(theta: float, head_dim: int) -> tuple[float, ...]:
    """theta ** (-2i / head_dim) in fp32, step by step as transformers computes it (equal up to the last bit)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return tuple((np.float32(1.0) / np.power(np.float32(theta), exponents)).tolist())


def rope_text(config: Any) -> str:
    """Rope as text: equal texts mean that K is rotated alike."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        return json.dumps(parameters, sort_keys=True)  # one rule a kind of layer
    theta = float(parameters.pop("rope_theta", 0.0))
    kind = parameters.pop("rope_type", "default")
    # Only scaled rope depends on these; the length itself says nothing about plain rope.
    scaling = "" if kind == "default" else f" {kind}{json.dumps(parameters, sort_keys=True)}"
    return f"theta={theta}{scaling}"


def _full_rotation(config: Any) -> bool:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("partial_rotary_factor", 1.0)) == 1.0
