"""TorchDecoder against Hugging Face transformers, the oracle for logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from decoder_world import Memory, run
from numpy.typing import NDArray

from remora.kernels.base import DecoderShape, WeightPrecision
from remora.kernels.batch import StepBatch
from remora.kernels.reference.decoder import TorchDecoder
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base.errors import KernelError

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


def make_decoder(
    model: transformers.PreTrainedModel, *, weights: WeightPrecision = "fp32", kv: str = "fp32", block_tokens: int = 16
) -> TorchDecoder:
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
    group = LayerGroup(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=head_dim,
        k_precision=kv,  # type: ignore[arg-type]
        v_precision=kv,  # type: ignore[arg-type]
    )
    return TorchDecoder(shape, tensors, KVGeometry(groups=(group,), block_tokens=block_tokens), num_threads=1)


def geometry_of(decoder: TorchDecoder) -> KVGeometry:
    return decoder._layouts.own.geometry


def expected_logits(model: transformers.PreTrainedModel, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    with torch.inference_mode():
        result: NDArray[np.float32] = model(torch.from_numpy(tokens)[None].long()).logits[0].numpy()
    return result


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("ends", [[77], [1, 2, 33, 64, 77], list(range(1, 78))], ids=["whole", "chunks", "one by one"])
def test_logits_equal_transformers_however_the_prompt_is_cut(family: str, ends: list[int]) -> None:
    model = make_model(family)
    decoder = make_decoder(model)
    tokens = np.random.default_rng(1).integers(0, 199, 77).astype(np.int32)
    memory = Memory(geometry_of(decoder), 9)
    logits = run(decoder, memory, tokens, np.array([7, 2, 8, 0, 5], np.int32), ends)
    assert np.abs(logits - expected_logits(model, tokens)).max() < 1e-3


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model = make_model("llama")
    decoder = make_decoder(model)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 199, length).astype(np.int32) for length in (1, 40, 16, 17)]
    tables = [np.array(t, np.int32) for t in ([3], [9, 1, 4], [6], [0, 8])]
    memory = Memory(geometry_of(decoder), 10)
    batch = StepBatch(max_tokens=80, max_sequences=4, max_blocks=4)
    rows = [batch.add(p, first_position=0, blocks=t) for p, t in zip(prompts, tables, strict=True)]
    logits = decoder.forward(batch, memory)
    for prompt, row in zip(prompts, rows, strict=True):
        assert np.abs(logits[row][0] - expected_logits(model, prompt)[-1]).max() < 1e-3


@pytest.mark.parametrize(("weights", "bound"), [("bf16", 0.25), ("int8", 0.6)])
def test_rounded_weights_stay_near_the_exact_model(weights: WeightPrecision, bound: float) -> None:
    model = make_model("llama")
    tokens = np.random.default_rng(3).integers(0, 199, 50).astype(np.int32)
    decoder = make_decoder(model, weights=weights, kv="bf16")
    logits = run(decoder, Memory(geometry_of(decoder), 4), tokens, np.arange(4, dtype=np.int32), [50])
    expected = expected_logits(model, tokens)
    error = np.abs(logits - expected).max() / expected.std()
    assert 0 < error < bound


def test_what_cannot_be_run_is_refused_before_anything_is_written() -> None:
    model = make_model("llama")
    decoder = make_decoder(model)
    memory = Memory(geometry_of(decoder), 4)
    before = memory.data.copy()
    batch = StepBatch(max_tokens=32, max_sequences=2, max_blocks=2)
    for tokens, blocks, message in [([5] * 17, [1, 4], "block 4"), ([5], [-1], "block -1"), ([199], [0], "vocabulary")]:
        batch.clear()
        batch.add([1], first_position=0, blocks=[0])
        batch.add(tokens, first_position=0, blocks=blocks)
        with pytest.raises(KernelError, match=message):
            decoder.forward(batch, memory)
    other = make_decoder(model, block_tokens=32)
    with pytest.raises(KernelError, match="geometry"):
        other.forward(batch, memory)
    assert (memory.data == before).all()
