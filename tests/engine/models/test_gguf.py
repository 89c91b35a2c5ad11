"""GGUF files: other architectures and types than SmolLM2's, and files that cannot be served."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_support import Runner, byte_tokenizer, plain_logits, random_prompt, save_tiny
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from remora.deployments.models.canonical_weights import CanonicalWeights
from remora.deployments.models.gguf_config import gguf_spec
from remora.deployments.models.gguf_file import GGUFFile
from remora.deployments.models.gguf_tokenizer import gguf_chat_tokenizer
from remora.deployments.models.gguf_weights import GGUFSource
from remora.deployments.models.load import load_model
from remora.deployments.models.weight_map import GGUF, HUGGING_FACE
from remora.kernels.grouped import GroupedTensor
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    *,
    metadata: dict[str, Any] | None = None,
    drop: str = "",
    extra: dict[str, np.ndarray] | None = None,
    pre: str = "gpt-2",
) -> None:
    """The model as llama.cpp's converter writes it, in fp32."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    tokenizer = byte_tokenizer()
    texts = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(texts) - 3))
    writer.add_token_merges(["a b"] if "ab" in texts else [])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    renamed = {ours: GGUF.names[key] for key, ours in HUGGING_FACE.names.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = name.removeprefix("model.layers.").split(".")[0]
        rest = name.removeprefix(f"model.layers.{layer}.") if name.startswith("model.layers.") else name
        stem, _, kind = rest.rpartition(".")
        new = renamed.get(rest) or f"{renamed[stem]}.{kind}"
        array = tensor.numpy()
        if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        full = f"blk.{layer}.{new}" if name.startswith("model.layers.") else new
        if full != drop:
            writer.add_tensor(full, np.ascontiguousarray(array))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path: Path, **options: Any) -> Any:
    settings = {"weights": "fp32", "kv_precision": "fp32", **options}
    return load_model(ModelConfig(name="m", source=str(path), **settings), block_tokens=16, num_threads=2)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_each_architecture_gives_transformers_logits(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    oracle = save_tiny(tmp_path, architecture, **options)
    write_gguf(tmp_path / "m.gguf", oracle, architecture)
    loaded = load(tmp_path / "m.gguf")
    prompt = random_prompt(40, 300)
    got = Runner(loaded.decoder, loaded.geometry, num_blocks=8).logits([prompt])[0]
    assert np.abs(got - plain_logits(oracle, prompt)).max() < 1e-3


def test_llama_3s_rope_divisors_are_used(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    oracle = save_tiny(tmp_path, "llama", rope_parameters=rope)
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    divisors = (plain / oracle.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 2
    write_gguf(tmp_path / "m.gguf", oracle, "llama", extra={"rope_freqs.weight": divisors})
    loaded = load(tmp_path / "m.gguf")
    prompt = random_prompt(100, 300)
    got = Runner(loaded.decoder, loaded.geometry, num_blocks=8).logits([prompt])[0]
    assert np.abs(got - plain_logits(oracle, prompt)).max() < 1e-3
    write_gguf(tmp_path / "plain.gguf", oracle, "llama")
    assert load(tmp_path / "plain.gguf").geometry != loaded.geometry


def test_linear_rope_scaling_is_used(tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, "llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "m.gguf", oracle, "llama", metadata=scaling)
    loaded = load(tmp_path / "m.gguf")
    prompt = random_prompt(50, 300)
    got = Runner(loaded.decoder, loaded.geometry, num_blocks=8).logits([prompt])[0]
    assert np.abs(got - plain_logits(oracle, prompt)).max() < 1e-3


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_type_is_dequantised_as_by_gguf(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.deployments.models.gguf_weights._VALUES_AT_ONCE", 100)
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    wanted_type = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(values, wanted_type)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", stored, raw_dtype=wanted_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(GGUFFile(tmp_path / "t.gguf"))
    assert source.shapes() == {"t": (6, 96)}
    got = source.read("t", torch.float32)
    assert np.array_equal(got.numpy(), gguf.quants.dequantize(stored, wanted_type).reshape(6, 96))
    assert np.abs(got.numpy() - values).max() < 0.5
    assert torch.equal(source.read("t", torch.bfloat16), got.to(torch.bfloat16))
    grouped = source.read_grouped("t")
    assert (grouped is not None) == (kind in ("Q4_0", "Q4_1", "Q8_0"))
    assert source.grouped_precision("t") == (grouped.precision if grouped else None)
    if grouped is not None:
        assert grouped.precision == ("int8" if kind == "Q8_0" else "int4")
        # Q4_0's codes are counted from 0 and its minimum is -8 scales, which rounds once more.
        assert torch.allclose(grouped.to_fp32(), got, rtol=0, atol=1e-6 if kind == "Q4_0" else 0)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_of_integers_are_those_of_the_file_whatever_was_asked_for(weights: str, smollm2_path: Path) -> None:
    file = GGUFFile(smollm2_path)
    source = GGUFSource(file)
    exact, plain = (
        CanonicalWeights(gguf_spec("m", file, weights=precision, max_model_len=None), source)  # type: ignore[arg-type]
        for precision in (weights, "fp32")
    )
    assert exact.num_exact() == 4 * 30 + 1
    for name in ("layers.7.qkv", "layers.29.gate_up", "layers.0.down"):
        weight = exact[name]
        assert isinstance(weight, GroupedTensor)
        assert weight.precision == "int4", "Q4_1 fits into four bits"
        assert torch.equal(weight.to_fp32(), plain[name])
    head = exact["lm_head"]
    assert isinstance(head, GroupedTensor)
    assert head.precision == "int8", "Q8_0 would lose four"
    assert torch.equal(head.to_fp32(), plain["embed"])


def test_the_reader_agrees_with_ggufs_own(smollm2_path: Path) -> None:
    ours, theirs = GGUFFile(smollm2_path), gguf.GGUFReader(smollm2_path)
    assert {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in theirs.tensors} == {
        name: tensor.shape for name, tensor in ours.tensors.items()
    }
    assert {tensor.name: tensor.data_offset for tensor in theirs.tensors} == {
        name: tensor.offset for name, tensor in ours.tensors.items()
    }
    for key in ("general.architecture", "llama.rope.freq_base", "tokenizer.ggml.add_bos_token", "llama.vocab_size"):
        assert ours.metadata[key] == theirs.fields[key].contents()
    assert ours.metadata["tokenizer.ggml.merges"][:50] == [
        theirs.fields["tokenizer.ggml.merges"].contents(i) for i in range(50)
    ]


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("gemma2", {}, r"GGUF gemma2\) cannot be served"),
        ("llama", {"metadata": {"expert_count": 8}}, "llama.expert_count"),
        ("llama", {"metadata": {"residual_scale": 0.5}}, "llama.residual_scale"),
        ("llama", {"metadata": {"rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
        ("llama", {"metadata": {"rope.dimension_count": 8}}, "rotation differ in size"),
        ("llama", {"drop": "blk.1.ffn_up.weight"}, r"tensor blk.1.ffn_up.weight is missing"),
        ("llama", {"drop": "token_embd.weight"}, "token_embd.weight is missing"),
        ("llama", {"extra": {"blk.0.ssm_a": np.zeros(4, np.float32)}}, "blk.0.ssm_a is unexpected"),
        ("llama", {"pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not supported"),
    ],
)
def test_a_file_that_cannot_be_served_right_is_refused_by_name(
    architecture: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    oracle = save_tiny(tmp_path, "llama")
    write_gguf(tmp_path / "m.gguf", oracle, architecture, **options)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "m.gguf")


def test_a_damaged_file_is_refused_at_every_length(smollm2_path: Path, tmp_path: Path) -> None:
    with smollm2_path.open("rb") as file:
        head = file.read(3_000_000)
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 10, 23, 24, 100, 1000, 50_000, 1_500_000):
        path.write_bytes(head[:length])
        with pytest.raises(ModelError, match=r"cut off|cannot be read|not a GGUF"):
            GGUFFile(path)
    path.write_bytes(head)
    with pytest.raises(ModelError, match="cut off inside tensor"):
        load(path, weights="bf16")
    path.write_bytes(b"GGUF" + struct.pack("<I", 99) + head[8:])
    with pytest.raises(ModelError, match="version 99"):
        GGUFFile(path)
    path.write_bytes(b"PK\x03\x04" + head[4:1000])
    with pytest.raises(ModelError, match="is not a GGUF file"):
        GGUFFile(path)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "smollm"])
def test_pre_tokenizers_split_numbers_as_their_models_do(pre: str, tmp_path: Path) -> None:
    oracle = save_tiny(tmp_path, "llama")
    write_gguf(tmp_path / "m.gguf", oracle, "llama", pre=pre)
    tokenizer = gguf_chat_tokenizer(GGUFFile(tmp_path / "m.gguf"))
    splits = Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer.pre_tokenize_str("x 1234  5")
    want = {
        "llama-bpe": ["x", "Ġ", "123", "4", "Ġ", "Ġ", "5"],
        "qwen2": ["x", "Ġ", "1", "2", "3", "4", "Ġ", "Ġ", "5"],
        "gpt-2": ["x", "Ġ1234", "Ġ", "Ġ5"],
        "smollm": ["x", "Ġ", "1", "2", "3", "4", "ĠĠ", "5"],
    }[pre]
    assert [text for text, _ in splits] == want
    bos = [1] if pre == "llama-bpe" else []
    assert tokenizer.encode("x")[: len(bos)] == bos
    assert tokenizer.decode(tokenizer.encode("x 1234  5<s>", False), False) == "x 1234  5<s>"
    if pre == "qwen2":
        assert tokenizer.decode(tokenizer.encode("e\u0301", False)) == "é", "Qwen normalises to NFC"


def test_a_replica_whose_weights_are_packed_already_starts_without_torch(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", save_tiny(tmp_path, "llama"), "llama")
    code = """
import sys
from pathlib import Path
from remora.cache_actors.weight_cache import WeightCache
from remora.cache_actors.weight_share import WeightShare
from remora.deployments import replica
from remora.deployments.models.load import load_model
from remora.deployments.models.weight_storage import WeightStorage
from remora.platform.base.model_config import ModelConfig
folder = Path(sys.argv[1])
for cluster in sys.argv[2:]:
    storage = WeightStorage(WeightShare(folder, cluster), WeightCache(folder, 1 << 30))
    model = ModelConfig(name="m", source=str(folder / "m.gguf"), weights="int4")
    loaded = load_model(model, block_tokens=32, num_threads=1, storage=storage)
    storage.settle()
    print(len({"torch", "transformers"} & set(sys.modules)))
"""

    def start(*clusters: str) -> list[str]:
        command = [sys.executable, "-c", code, str(tmp_path), *clusters]
        return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout.split()

    assert start("c") == ["1"], "packing needs torch"
    assert start("c", "c") == ["0", "0"], "neither does reading them, nor sharing them"
