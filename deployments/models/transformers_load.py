"""Loads a model of transformers for TransformersDecoder, or says by name why it cannot be served."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from remora.deployments.models.refusals import refuse, refuse_window
from remora.deployments.models.safetensors_weights import SafetensorsSource
from remora.deployments.models.transformers_decoder import (
    ATTENTION_NAME,
    LayerCall,
    register_attention,
    trace_attention,
)
from remora.platform.base.model_config import ModelConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformers_bytes(folder: Path, model: ModelConfig) -> int:
    """Memory that the folder's weights take in the precision asked for, from their headers."""
    num_values = sum(math.prod(shape) for shape in SafetensorsSource(folder).shapes().values())
    return num_values * _dtype(model, "transformers").itemsize


def load_transformers(folder: Path, model: ModelConfig, config: Any, context_len: int) -> tuple[Any, LayerCall]:
    """The model in evaluation mode with paged attention, and what its layers hand to attention.

    Raises ModelError for weights that do not fit the config and for attention that cannot be served right.
    """
    import transformers

    architecture = str(config.model_type)
    dtype = _dtype(model, architecture)
    register_attention()
    try:
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
        )
    except KeyError as error:
        if ATTENTION_NAME not in str(error):
            refuse(model.name, architecture, f"transformers cannot load it: {error!r}")
        refuse(model.name, architecture, "its attention does not go through transformers' attention interface.")
    except Exception as error:  # transformers raises whatever the architecture's code stumbles over
        refuse(model.name, architecture, f"transformers cannot load it: {str(error).strip().splitlines()[0]}")
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            first = sorted(str(key) for key in info[what])[:5]
            refuse(model.name, architecture, f"its weights do not fit its config: {what} {', '.join(first)}.")
    loaded.eval()
    call = trace_attention(model.name, loaded)
    if call.sliding_window is not None and call.sliding_window < context_len:
        refuse_window(model.name, architecture, call.sliding_window)
    return loaded, call


def _dtype(model: ModelConfig, architecture: str) -> torch.dtype:
    if model.weights not in _DTYPES:
        refuse(
            model.name, architecture, f"weights: {model.weights} needs the own decoder; set weights to bf16 or fp32."
        )
    return _DTYPES[model.weights]
