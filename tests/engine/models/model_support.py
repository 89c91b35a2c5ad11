"""Tiny models on disk, and prompts run through a decoder over private memory in any cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from remora.kernels.base import Decoder
from remora.kernels.batch import StepBatch
from remora.namespaces.geometry import KVGeometry

TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Weights large enough for attention to be far from uniform, so that mistakes show.
    "initializer_range": 0.15,
}


def save_tiny(
    folder: Path, model_type: str, *, max_shard_size: str = "1GB", seed: int = 0, **options: Any
) -> transformers.PreTrainedModel:
    """Writes a random model with a byte tokenizer as a Hugging Face folder and returns it, in fp32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**TINY, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        # Norms and biases start at ones and zeros, which would hide that they are left out.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def byte_tokenizer() -> Tokenizer:
    """Byte-level, 256 bytes behind 3 special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer


@dataclass(frozen=True)
class Memory:
    data: NDArray[np.uint8]
    geometry: KVGeometry


class Runner:
    """Feeds prompts to a decoder; blocks are handed out scattered, as a pool would."""

    def __init__(
        self, decoder: Decoder, geometry: KVGeometry, *, num_blocks: int = 200, max_tokens: int = 2100
    ) -> None:
        self.decoder = decoder
        self.geometry = geometry
        # Garbage in unused slots must not matter.
        data = np.random.default_rng(1).integers(0, 255, num_blocks * geometry.block_bytes).astype(np.uint8)
        self.memory = Memory(data, geometry)
        self.batch = StepBatch(max_tokens=max_tokens, max_sequences=16, max_blocks=num_blocks)
        self.free = list(np.random.default_rng(2).permutation(num_blocks))

    def blocks_for(self, num_tokens: int) -> list[int]:
        return [int(self.free.pop()) for _ in range(-(-num_tokens // self.geometry.block_tokens))]

    def logits(self, prompts: Sequence[Sequence[int]], *, chunk: int | None = None) -> list[NDArray[np.float32]]:
        """Logits of every position of every prompt; all prompts advance together, `chunk` tokens a step."""
        blocks = [self.blocks_for(len(prompt)) for prompt in prompts]
        results: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
            self.batch.clear()
            rows = {}
            for i, prompt in enumerate(prompts):
                part = list(prompt[done[i] : done[i] + (chunk or len(prompt))])
                if part:
                    rows[i] = self.batch.add(part, first_position=done[i], blocks=blocks[i], logits="all")
                    done[i] += len(part)
            step = self.decoder.forward(self.batch, self.memory)
            for i, own in rows.items():
                results[i].append(step[own].copy())
        return [np.concatenate(parts) for parts in results]

    def logits_from(self, tokens: Sequence[int], first_position: int, blocks: list[int]) -> NDArray[np.float32]:
        """Logits of `tokens` behind `first_position` tokens whose KV lies in `blocks` already."""
        self.batch.clear()
        rows = self.batch.add(list(tokens), first_position=first_position, blocks=blocks, logits="all")
        return self.decoder.forward(self.batch, self.memory)[rows].copy()

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy continuation, one token a step behind the prompt."""
        blocks = self.blocks_for(len(prompt) + num_tokens)
        output: list[int] = []
        part, position = list(prompt), 0
        for _ in range(num_tokens):
            self.batch.clear()
            rows = self.batch.add(part, first_position=position, blocks=blocks)
            position += len(part)
            part = [int(self.decoder.forward(self.batch, self.memory)[rows][0].argmax())]
            output += part
        return output


def plain_logits(model: transformers.PreTrainedModel, prompt: Sequence[int]) -> NDArray[np.float32]:
    """transformers' own logits of every position."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([list(prompt)]), use_cache=False)
    result: NDArray[np.float32] = output.logits[0].float().numpy()
    return result


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed + length).integers(3, vocab_size, length)]
