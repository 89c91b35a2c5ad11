"""A Llama of 1.17 billion random weights, as a Hugging Face folder and as a GGUF file with the same numbers, both bf16.

make_random_model.py SMOLLM2_FOLDER SMOLLM2.gguf FOLDER FILE.gguf

Tokenizer and metadata are SmolLM2's. No two weights share memory, so that no cache serves one for another.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import save_file

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 16, 2048, 8192, 32, 8, 49152
CONTEXT = 4096
#: What the two forms call the weights of a layer, and their rows and columns.
LAYER_WEIGHTS = {
    ("self_attn.q_proj", "attn_q"): (HIDDEN, HIDDEN),
    ("self_attn.k_proj", "attn_k"): (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    ("self_attn.v_proj", "attn_v"): (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    ("self_attn.o_proj", "attn_output"): (HIDDEN, HIDDEN),
    ("mlp.gate_proj", "ffn_gate"): (INNER, HIDDEN),
    ("mlp.up_proj", "ffn_up"): (INNER, HIDDEN),
    ("mlp.down_proj", "ffn_down"): (HIDDEN, INNER),
    ("input_layernorm", "attn_norm"): (HIDDEN,),
    ("post_attention_layernorm", "ffn_norm"): (HIDDEN,),
}
#: Of SmolLM2's metadata, what is this model's own.
SIZES = {
    "llama.block_count": LAYERS,
    "llama.context_length": CONTEXT,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.vocab_size": VOCAB,
    "llama.rope.dimension_count": HIDDEN // HEADS,
    "general.file_type": 32,
}


def names() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", "token_embd.weight", (VOCAB, HIDDEN)
    for index in range(LAYERS):
        for (folder_name, gguf_name), shape in LAYER_WEIGHTS.items():
            yield f"model.layers.{index}.{folder_name}.weight", f"blk.{index}.{gguf_name}.weight", shape
    yield "model.norm.weight", "output_norm.weight", (HIDDEN,)
    yield "lm_head.weight", "output.weight", (VOCAB, HIDDEN)


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)


def copy_metadata(source: Path, writer: GGUFWriter) -> None:
    for name, field in GGUFReader(source).fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *inner = field.types
        value = SIZES.get(name, field.contents())
        writer.add_key_value(name, value, kind, inner[0] if kind == GGUFValueType.ARRAY else None)


def main(template: Path, template_gguf: Path, folder: Path, file: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in template.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, folder)
    config = json.loads((template / "config.json").read_text())
    config |= {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    writer = GGUFWriter(file, "llama")
    copy_metadata(template_gguf, writer)
    for folder_name, gguf_name, shape in names():
        tensor = random_tensor(shape, generator)
        tensors[folder_name] = tensor.to(torch.bfloat16)
        if len(shape) == 1:
            writer.add_tensor(gguf_name, tensor.numpy())
        else:
            bits = tensors[folder_name].view(torch.uint8).numpy()
            writer.add_tensor(gguf_name, bits, raw_dtype=GGMLQuantizationType.BF16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
