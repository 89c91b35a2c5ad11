"""The own decoder, fed by every loader, gives transformers' logits in fp32, however prompts are cut and mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from model_support import Runner, plain_logits, random_prompt, save_tiny

from remora.deployments.models.load import load_model
from remora.deployments.models.load_target import MakeDecoder, host_target
from remora.deployments.models.loaded_model import LoadedModel
from remora.kernels.reference.decoder import TorchDecoder
from remora.platform.base.model_config import ModelConfig

TOLERANCE = 1e-3

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, with biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama, own head size": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, window as long as the context": ("mistral", {"sliding_window": 4096}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


def load(source: Path | str, make: MakeDecoder | None = None, **options: Any) -> LoadedModel:
    settings = {"weights": "fp32", "kv_precision": "fp32", **options}
    model = ModelConfig(name="m", source=str(source), **settings)
    return load_model(model, block_tokens=16, num_threads=2, target=host_target(make))


def assert_close(got: Any, want: Any) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "make"), [*((name, None) for name in FAMILY), ("llama", TorchDecoder), ("qwen3", TorchDecoder)]
)
def test_a_folder_of_the_llama_family_gives_transformers_logits(
    name: str, make: MakeDecoder | None, tmp_path: Path
) -> None:
    """With the decoder that the registry chooses, and with the torch reference."""
    model_type, options = FAMILY[name]
    oracle = save_tiny(tmp_path, model_type, **options)
    loaded = load(tmp_path, make)
    assert loaded.max_model_len == 4096
    assert loaded.vocab_size == 300
    assert loaded.eos_token_ids == (2,)
    runner = Runner(loaded.decoder, loaded.geometry)
    prompts = [random_prompt(length, 300) for length in (1, 2, 15, 16, 17, 50)]
    want = [plain_logits(oracle, prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, want, strict=True):
        assert_close(runner.logits([prompt])[0], logits)
    for chunk in (None, 1, 7):
        for got, logits in zip(runner.logits(prompts, chunk=chunk), want, strict=True):
            assert_close(got, logits)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, "llama", max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load(tmp_path)
    prompt = random_prompt(40, 300)
    assert_close(Runner(loaded.decoder, loaded.geometry).logits([prompt])[0], plain_logits(oracle, prompt))


def test_longrope_is_served_within_its_original_context(tmp_path: Path) -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [9.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 64.0, **factors}
    oracle = save_tiny(tmp_path, "llama", rope_parameters=rope)
    loaded = load(tmp_path, max_model_len=64)
    assert loaded.max_model_len == 64
    prompt = random_prompt(64, 300)
    assert_close(Runner(loaded.decoder, loaded.geometry).logits([prompt])[0], plain_logits(oracle, prompt))


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_path: Path) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype="float32"
    )
    return model.eval()


@pytest.mark.timeout(900)
def test_smollm2_gives_transformers_logits_on_prompts_of_1_to_2000_tokens(
    smollm2_path: Path, smollm2_oracle: transformers.PreTrainedModel
) -> None:
    loaded = load(smollm2_path)
    assert loaded.max_model_len == 8192
    assert loaded.eos_token_ids == (2, 0)
    text = Path(__file__).read_text() * 3
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    prompts = [ids[:length] for length in (1, 2, 33, 500, 2000)]
    want = {len(prompt): plain_logits(smollm2_oracle, prompt) for prompt in prompts}
    runner = Runner(loaded.decoder, loaded.geometry, num_blocks=420, max_tokens=2600)
    for prompt in prompts:
        assert_close(runner.logits([prompt])[0], want[len(prompt)])
    for got, prompt in zip(runner.logits(prompts, chunk=512), prompts, strict=True):
        assert_close(got, want[len(prompt)])
    assert_close(runner.logits([prompts[2]], chunk=1)[0], want[33])
    # Cached: the first 480 tokens' blocks were computed by another sequence.
    blocks = runner.blocks_for(500)
    runner.logits_from(prompts[3][:480], 0, blocks)
    shared = [*blocks[:30], *runner.blocks_for(500)[30:]]
    assert_close(runner.logits_from(prompts[3][480:], 480, shared), want[500][480:])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_smollm2_in_few_bits_answers_a_plain_question(weights: str, smollm2_path: Path) -> None:
    loaded = load(smollm2_path, weights=weights, kv_precision="bf16")
    tokenizer = loaded.tokenizer
    # Not the capital of France: there two first tokens are 0.1 apart, which rounding may turn round.
    text = tokenizer.render([{"role": "user", "content": "What color is the sky?"}])
    output = Runner(loaded.decoder, loaded.geometry).greedy(tokenizer.encode(text, add_special_tokens=False), 16)
    assert "blue" in tokenizer.decode(output)
