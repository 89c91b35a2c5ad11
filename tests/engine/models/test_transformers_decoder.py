"""Full-attention models outside the Llama family run through transformers with paged KV, and give its own logits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from model_support import Runner, plain_logits, random_prompt, save_tiny

from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.transformers_decoder import TransformersDecoder
from remora.kernels.batch import StepBatch
from remora.platform.base.errors import KernelError, ModelError
from remora.platform.base.model_config import ModelConfig

OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "phi": {},
    "gemma": {"head_dim": 16},
    "stablelm": {},
    "olmo2": {},
    "cohere": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "smollm3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "phi3": {"sliding_window": None},
}


def load(folder: Path, **options: Any) -> LoadedModel:
    settings = {"weights": "fp32", "kv_precision": "fp32", "max_model_len": 256, **options}
    return load_model(ModelConfig(name="m", source=str(folder), **settings), block_tokens=16, num_threads=2)


@pytest.mark.parametrize("model_type", OTHERS)
def test_paged_attention_gives_the_models_own_logits(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = save_tiny(tmp_path, model_type, **OTHERS[model_type])
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)
    assert "slower" in caplog.text
    assert loaded.decoder.name == f"transformers-{model_type}"
    assert not loaded.decoder.batch_invariant
    assert loaded.vocab_size == 300
    runner = Runner(loaded.decoder, loaded.geometry, num_blocks=60, max_tokens=400)
    prompts = [random_prompt(length, 300) for length in (1, 2, 17, 60)]
    want = [plain_logits(oracle, prompt) for prompt in prompts]
    for chunk in (None, 7):
        for got, logits in zip(runner.logits(prompts, chunk=chunk), want, strict=True):
            assert np.abs(got - logits).max() < 1e-3
    greedy = runner.greedy(prompts[2], 5)
    assert greedy[0] == int(want[2][-1].argmax())


def test_a_llama_folder_can_be_told_to_run_through_transformers(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    own, slow = load(tmp_path), load(tmp_path, backend="transformers")
    assert isinstance(slow.decoder, TransformersDecoder)
    assert not isinstance(own.decoder, TransformersDecoder)
    assert own.fingerprint != slow.fingerprint, "their KV differs in the last bits"
    prompt = random_prompt(30, 300)
    ours, theirs = (Runner(loaded.decoder, loaded.geometry, num_blocks=8).logits([prompt])[0] for loaded in (own, slow))
    assert np.abs(ours - theirs).max() < 1e-3


def test_bf16_weights_and_kv_stay_near_fp32(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, "gpt_neox")
    loaded = load(tmp_path, weights="bf16", kv_precision="bf16")
    prompt = random_prompt(40, 300)
    got, want = Runner(loaded.decoder, loaded.geometry, num_blocks=8).logits([prompt])[0], plain_logits(oracle, prompt)
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_a_step_outside_memory_or_vocabulary_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_neox")
    loaded = load(tmp_path)
    runner = Runner(loaded.decoder, loaded.geometry, num_blocks=4)
    before = runner.memory.data.copy()
    for tokens, blocks, match in (
        ([5], [4], "outside an arena"),
        ([300], [0], "vocabulary"),
        ([-1], [0], "vocabulary"),
    ):
        batch = StepBatch(max_tokens=4, max_sequences=1, max_blocks=1)
        batch.add(tokens, first_position=0, blocks=blocks)
        with pytest.raises(KernelError, match=match):
            loaded.decoder.forward(batch, runner.memory)
    assert np.array_equal(before, runner.memory.data)
    with pytest.raises(KernelError, match="geometry"):
        loaded.decoder.check_geometry(msgspec.structs.replace(loaded.geometry, block_tokens=32))


def test_each_step_has_the_precision_of_its_memory_and_kv_that_is_not_finite_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_neox")
    one = load(tmp_path)
    prompt = random_prompt(30, 300)
    for precision in ("int8", "fp32"):
        geometry, fingerprint = one.in_precision((precision, precision))
        own = load(tmp_path, kv_precision=precision)
        assert (own.geometry, own.fingerprint) == (geometry, fingerprint)
        got, want = (Runner(each.decoder, geometry, num_blocks=4).logits([prompt])[0] for each in (one, own))
        assert np.array_equal(got, want)
    one.decoder._model.get_input_embeddings().weight.data[7] = torch.inf
    runner = Runner(one.decoder, one.geometry, num_blocks=4)
    batch = StepBatch(max_tokens=8, max_sequences=2, max_blocks=1)
    batch.add([1, 7, 2], first_position=0, blocks=[0])
    batch.add([1, 3, 2], first_position=0, blocks=[1])
    one.decoder.forward(batch, runner.memory)
    assert batch.not_finite_S.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("gemma2", {"head_dim": 16, "sliding_window": 4096}, "softcap"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}, "sliding window of 128"),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 64}, "sliding window of 64"),
        ("starcoder2", {"sliding_window": 32}, "sliding window of 32"),
        ("mistral", {"sliding_window": 64}, "sliding window of 64 .* max_model_len to at most 64"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "sliding window of 64"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "position_ids"),
        ("bert", {}, "not causal"),
        ("xglm", {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 64}, "attention interface"),
        (
            "deepseek_v3",
            {
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
            },
            "latent attention",
        ),
        ("jamba", {}, "hybrid"),
        ("mamba", {}, "hybrid"),
        ("t5", {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 64}, "encoder-decoder"),
        ("gemma3", {}, "multimodal"),
        (
            "phi3",
            {
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 64,
                },
            },
            "'longrope' changes with the length .* max_model_len to at most 64",
        ),
        (
            "llama",
            {
                "max_position_embeddings": 128,
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 10000.0,
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                },
            },
            "'dynamic' changes with the length",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_cannot_be_served_right_is_refused_by_name(
    model_type: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    from model_support import TINY, byte_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    base = {} if model_type == "gemma3" else TINY
    config = AutoConfig.for_model(model_type, **{**base, **options})
    config.save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    if model_type in ("gemma2", "bloom", "bert", "xglm", "jamba", "mamba"):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        load(tmp_path)
    assert f"model 'm' ({config.model_type}) cannot be served" in str(caught.value)


def test_a_window_as_long_as_the_served_context_is_served(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, "starcoder2", sliding_window=64)
    loaded = load(tmp_path, max_model_len=64)
    prompt = random_prompt(64, 300)
    got = Runner(loaded.decoder, loaded.geometry, num_blocks=8).logits([prompt])[0]
    assert np.abs(got - plain_logits(oracle, prompt)).max() < 1e-3


def test_int8_weights_need_the_own_decoder(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_neox")
    with pytest.raises(ModelError, match="weights: int8 needs the own decoder"):
        load(tmp_path, weights="int8")
    with pytest.raises(ModelError, match="backend: transformers"):
        load(tmp_path, backend="native")


def test_a_model_whose_positions_come_from_elsewhere_fails_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that a model makes up itself are right for a whole prompt and wrong for its second chunk."""
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXModel

    save_tiny(tmp_path, "gpt_neox")
    plain = GPTNeoXModel.forward

    def forgetful(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return plain(self, *args, position_ids=None, **kwargs)

    monkeypatch.setattr(GPTNeoXModel, "forward", forgetful)
    with pytest.raises(ModelError, match="logits are off"):
        load(tmp_path)
