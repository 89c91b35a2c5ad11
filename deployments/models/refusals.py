"""What cannot be served right is refused here, by name, before a weight is read."""

from __future__ import annotations

from typing import Any, NoReturn

from remora.platform.base.errors import ModelError

_ROPE_THAT_GROWS = frozenset({"dynamic", "longrope"})
_SUB_MODELS = ("vision_config", "audio_config", "text_config", "speech_config", "image_config")


def refuse(name: str, architecture: str, reason: str) -> NoReturn:
    """Raises ModelError in the one form all refusals have."""
    raise ModelError(f"model {name!r} ({architecture}) cannot be served: {reason}")


def check_servable(name: str, config: Any, context_len: int) -> None:
    """Raises ModelError for a transformers config that is not plain full causal attention over `context_len` tokens."""
    architecture = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        refuse(name, architecture, "it is an encoder-decoder model; only decoders are served.")
    parts = [part for part in _SUB_MODELS if getattr(config, part, None) is not None]
    if parts:
        refuse(name, architecture, f"it is multimodal ({parts[0]}); only text models are served.")
    if getattr(config, "quantization_config", None) is not None:
        method = config.quantization_config
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", method)
        refuse(
            name,
            architecture,
            f"its weights are quantised ({method}); use the original weights and `weights: int8`, or a GGUF file.",
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        refuse(name, architecture, "it uses multi-head latent attention (MLA), which is not served yet.")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        refuse(name, architecture, "it uses ALiBi attention biases, which are not served.")
    _check_window(name, architecture, config, context_len)
    _check_rope(name, architecture, config, context_len)


def _check_window(name: str, architecture: str, config: Any, context_len: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention", "attention"})
    if others:
        refuse(name, architecture, f"it is a hybrid model with layers of kind {others[0]!r}; only attention is served.")
    windowed = kinds & {"sliding_attention", "chunked_attention"}
    if kinds and not windowed:
        return
    window = getattr(config, "sliding_window", None)
    if "chunked_attention" in kinds:
        window = getattr(config, "attention_chunk_size", None)
    if window is None and not windowed:
        return
    if window is None or window < context_len:
        refuse_window(name, architecture, window)


def _check_rope(name: str, architecture: str, config: Any, context_len: int) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    rules = [rule for rule in parameters.values() if isinstance(rule, dict)] or [parameters]
    kind = next((rule["rope_type"] for rule in rules if rule.get("rope_type") in _ROPE_THAT_GROWS), None)
    if kind is None:
        return
    original = original_context_len(config)
    if context_len > original:
        refuse(
            name,
            architecture,
            f"its rope scaling {kind!r} changes with the length of each sequence beyond {original} tokens, so cached "
            f"keys would be wrong; set max_model_len to at most {original}.",
        )


def refuse_window(name: str, architecture: str, window: int | None) -> NoReturn:
    """Raises ModelError for attention that does not see the whole context."""
    limit = f"set max_model_len to at most {window}" if window else "choose another model"
    refuse(
        name,
        architecture,
        f"it attends within a sliding window of {window} tokens, and only full attention is served; {limit}.",
    )


def original_context_len(config: Any) -> int:
    """Length up to which a rope that grows is still the one the model was trained with."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(found or config.max_position_embeddings)
