"""Small random models of transformers, the oracle for logits, and their weights as our decoders name them."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from remora.kernels.base import DecoderShape, WeightPrecision

_SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def make_model(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    config_class = {
        "llama": transformers.LlamaConfig,
        "llama-tied": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[family]
    sizes = dict(_SIZES, tie_word_embeddings=family == "llama-tied")
    if family == "qwen3":
        sizes["head_dim"] = 32
    model = transformers.AutoModelForCausalLM.from_config(config_class(**sizes), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        # Norms and biases start at 1 and 0, which would hide a mistake in their use.
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval().float()


def shape_and_weights(
    model: transformers.PreTrainedModel, *, weights: WeightPrecision = "fp32"
) -> tuple[DecoderShape, dict[str, torch.Tensor]]:
    config, state = model.config, model.state_dict()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tensors = {
        "embed": state["model.embed_tokens.weight"],
        "final_norm": state["model.norm.weight"],
        "rope_inv_freq": model.model.rotary_emb.inv_freq,
    }
    if not config.tie_word_embeddings:
        tensors["lm_head"] = state["lm_head.weight"]
    for index in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        tensors[ours + "input_norm"] = state[theirs + "input_layernorm.weight"]
        tensors[ours + "post_norm"] = state[theirs + "post_attention_layernorm.weight"]
        tensors[ours + "qkv"] = torch.cat([state[f"{attention}{x}_proj.weight"] for x in "qkv"])
        tensors[ours + "o"] = state[attention + "o_proj.weight"]
        tensors[ours + "gate_up"] = torch.cat([state[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")])
        tensors[ours + "down"] = state[mlp + "down_proj.weight"]
        if attention + "q_proj.bias" in state:
            tensors[ours + "qkv_bias"] = torch.cat([state[f"{attention}{x}_proj.bias"] for x in "qkv"])
        if attention + "q_norm.weight" in state:
            tensors[ours + "q_norm"] = state[attention + "q_norm.weight"]
            tensors[ours + "k_norm"] = state[attention + "k_norm.weight"]
    shape = DecoderShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        qk_norm="layers.0.q_norm" in tensors,
        qkv_bias="layers.0.qkv_bias" in tensors,
        weights=weights,
    )
    return shape, tensors


def expected_logits(model: transformers.PreTrainedModel, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    with torch.inference_mode():
        result: NDArray[np.float32] = model(torch.from_numpy(tokens)[None].long()).logits[0].numpy()
    return result
