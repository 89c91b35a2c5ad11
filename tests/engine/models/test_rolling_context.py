"""A conversation longer than its context, on a real model: what it says behind a roll is as likely as in a cold run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from remora.cache_actors.kv_sequences import KVSequences
from remora.cache_actors.local_pool import LocalPool
from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.kernels.batch import StepBatch
from remora.kernels.mover import KVMover
from remora.namespaces.commands import Admit, Admitted, Extend, Extended, ExtendItem
from remora.platform.base.ids import LeaseId, NamespaceId, SequenceId
from remora.platform.base.model_config import ModelConfig

BLOCK_TOKENS = 32
DOCS = Path(__file__).parents[3] / "docs"
NAME = SequenceId("s")


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(ModelConfig(name="m", source=str(smollm2_path)), block_tokens=BLOCK_TOKENS, num_threads=2)


class Context:
    """Computes one sequence in a pool, chunk by chunk, and lets it roll."""

    def __init__(self, model: LoadedModel, *, limit: int, keep: int) -> None:
        self.model, self.limit, self.keep = model, limit, keep
        num_blocks = 2 * limit // BLOCK_TOKENS + 2
        self.pool = LocalPool.alone(model.geometry, num_blocks=num_blocks, namespaces={"ns": None})
        self.operations = KVSequences(self.pool.ask, KVMover(self.pool.memory, model.rope_inv_freq))
        self.batch = StepBatch(max_tokens=BLOCK_TOKENS * 8, max_sequences=1, max_blocks=num_blocks)
        self.tokens: list[int] = []
        admitted = asyncio.run(
            self.pool.ask(
                Admit(
                    lease_id=LeaseId(""), sequence_id=NAME, namespace_id=NamespaceId("ns"), hashes=(), num_tokens=1,
                    num_blocks=1, max_blocks=num_blocks,
                )
            )
        )  # fmt: skip
        assert isinstance(admitted, Admitted)
        self.table = list(admitted.blocks)

    def say(self, tokens: Sequence[int], *, score: int = 0) -> list[float]:
        """Computes the tokens; the log-likelihoods of the last `score` of them."""
        scores: list[float] = []
        for start in range(0, len(tokens) - 1, BLOCK_TOKENS * 8):
            chunk = list(tokens[start : min(start + BLOCK_TOKENS * 8, len(tokens) - 1)])
            while chunk:
                if len(self.tokens) == self.limit:
                    self.roll()
                part, chunk = chunk[: self.limit - len(self.tokens)], chunk[self.limit - len(self.tokens) :]
                logits_RV = self.compute(part)
                scores += self.score(logits_RV, [*tokens[start + 1 :]][: len(part)])
                start += len(part)
        return scores[-score:]

    def compute(self, part: list[int]) -> np.ndarray:
        missing = -(-(len(self.tokens) + len(part)) // BLOCK_TOKENS) - len(self.table)
        if missing > 0:
            item = ExtendItem(sequence_id=NAME, num_blocks=missing)
            extended = asyncio.run(self.pool.ask(Extend(lease_id=LeaseId(""), items=(item,))))
            assert isinstance(extended, Extended)
            self.table += extended.grants[0].blocks
        self.batch.clear()
        self.batch.add(part, first_position=len(self.tokens), blocks=self.table, logits="all")
        self.tokens += part
        return self.model.decoder.forward(self.batch, self.pool.memory)

    @staticmethod
    def score(logits_RV: np.ndarray, following: list[int]) -> list[float]:
        top_R1 = logits_RV.max(axis=1, keepdims=True)
        norm_R = np.log(np.exp(logits_RV - top_R1).sum(axis=1)) + top_R1[:, 0]
        return (logits_RV[np.arange(len(following)), following] - norm_R).tolist()

    def roll(self) -> None:
        end = self.keep + (self.limit - self.keep) // 2
        removal = self.operations.seq_rm(NAME, self.keep, end, close_gap=True, num_tokens=self.limit)
        edited = asyncio.run(removal)
        self.table = self.table[: edited.num_kept_blocks] + list(edited.blocks)
        del self.tokens[self.keep : end]


def conversation(model: LoadedModel, num_tokens: int) -> list[int]:
    """Paragraphs of this project's pages, said in turns."""
    text = "\n\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    turns = [
        paragraph for paragraph in text.split("\n\n") if len(paragraph) > 80 and not paragraph.startswith(("|", " "))
    ]
    said = [
        f"<|im_start|>{'user' if number % 2 == 0 else 'assistant'}\n{turn}<|im_end|>\n"
        for number, turn in enumerate(turns)
    ]
    tokens = list(model.tokenizer.encode("".join(said), False, field="prompt"))
    assert len(tokens) >= num_tokens
    return tokens[:num_tokens]


def perplexities(model: LoadedModel, *, limit: int, keep: int, num_tokens: int, score: int) -> tuple[float, float]:
    """Of the last tokens: in the context that rolled, and in a cold run on what it had kept."""
    tokens = conversation(model, num_tokens + 1)
    rolling = Context(model, limit=limit, keep=keep)
    rolled = rolling.say(tokens, score=score)
    cold = Context(model, limit=limit, keep=keep).say([*rolling.tokens, tokens[-1]], score=score)
    return float(np.exp(-np.mean(rolled))), float(np.exp(-np.mean(cold)))


def test_a_context_that_rolled_is_as_sure_of_what_follows_as_a_cold_one(model: LoadedModel) -> None:
    """512 tokens, rolled at 512, 736 and 960; the last roll is right before what is scored."""
    rolled, cold = perplexities(model, limit=512, keep=64, num_tokens=1088, score=128)
    print(f"perplexity: rolled {rolled:.3f}, cold {cold:.3f}")
    assert rolled == pytest.approx(cold, rel=0.1)


@pytest.mark.soak
def test_a_conversation_of_4096_tokens_in_a_context_of_2048_stays_coherent(model: LoadedModel) -> None:
    """Rolled at 2,048, 2,944 and 3,840 tokens: all that is scored comes behind the last roll."""
    rolled, cold = perplexities(model, limit=2048, keep=256, num_tokens=4096, score=256)
    print(f"perplexity: rolled {rolled:.3f}, cold {cold:.3f}")
    assert rolled == pytest.approx(cold, rel=0.1)
