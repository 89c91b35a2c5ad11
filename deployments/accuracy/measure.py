"""How far a precision of weights or KV moves a model's predictions from a reference, on one text.

Both models read the text through their own decoder in steps of a few hundred tokens, as a prompt is read, so that later
tokens see the earlier ones through KV in its precision. Shapes: T tokens of the text, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from remora.deployments.models.load import LoadedModel
from remora.kernels.batch import StepBatch
from remora.kernels.reencoder import HostMemory
from remora.platform.base.errors import InvalidRequest

#: Written for Remora, under its licence: history, science, dialogue, questions, Python, instructions.
TEXT_NAME = "text.txt"
#: Tokens of a step.
_STEP_TOKENS = 256
#: Fewer tokens say nothing.
MIN_TOKENS = 64

Load = Callable[[], LoadedModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Of a model against its reference, over the tokens of a text."""

    num_tokens: int
    reference_perplexity: float
    perplexity: float
    #: Mean over tokens of KL(reference ‖ model), in nats.
    kl_divergence: float
    #: Share of tokens where both find the same next token the likeliest.
    top1_agreement: float

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.01 is one per cent worse."""
        return self.perplexity / self.reference_perplexity - 1


def own_text() -> str:
    """The text that ships with the package."""
    return files(__package__).joinpath(TEXT_NAME).read_text(encoding="utf-8")


def text_id(text: str) -> str:
    """A short name of a text: equal texts have equal names."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def measure(load_reference: Load, load_model: Load, text: str) -> Accuracy:
    """Loads one after the other, so that no more than one is in memory; the reference's predictions wait in a file.

    Raises InvalidRequest for a text of fewer than MIN_TOKENS tokens.
    """
    with tempfile.TemporaryDirectory(prefix="remora-accuracy-") as folder:
        reference = load_reference()
        token_ids = np.asarray(reference.tokenizer.encode(text)[: reference.max_model_len], np.int32)
        if len(token_ids) < MIN_TOKENS:
            raise InvalidRequest(f"text: {len(token_ids)} tokens; at least {MIN_TOKENS} are needed", field="text")
        kept = np.memmap(
            Path(folder) / "reference", np.float32, mode="w+", shape=(len(token_ids), reference.vocab_size)
        )
        for start, log_probabilities_TV in _predict(reference, token_ids):
            kept[start : start + len(log_probabilities_TV)] = log_probabilities_TV
        del reference
        model = load_model()
        sums = _Sums()
        for start, log_probabilities_TV in _predict(model, token_ids):
            sums.add(kept[start : start + len(log_probabilities_TV)], log_probabilities_TV, token_ids[start + 1 :])
        del kept
    return sums.accuracy()


class _Sums:
    """What single tokens add up to. The last token has no next one: it counts for divergence, not for perplexity."""

    def __init__(self) -> None:
        self._num_tokens = self._num_next = self._num_agreed = 0
        self._divergence = self._loss = self._reference_loss = 0.0

    def add(self, reference_TV: NDArray[np.float32], model_TV: NDArray[np.float32], next_T: NDArray[np.int32]) -> None:
        next_T = next_T[: len(model_TV)]
        rows = np.arange(len(next_T))
        self._num_tokens += len(model_TV)
        self._num_next += len(next_T)
        self._num_agreed += int((reference_TV.argmax(axis=1) == model_TV.argmax(axis=1)).sum())
        self._loss -= float(model_TV[rows, next_T].sum(dtype=np.float64))
        self._reference_loss -= float(reference_TV[rows, next_T].sum(dtype=np.float64))
        self._divergence += float((np.exp(reference_TV) * (reference_TV - model_TV)).sum(dtype=np.float64))

    def accuracy(self) -> Accuracy:
        return Accuracy(
            num_tokens=self._num_tokens,
            reference_perplexity=math.exp(self._reference_loss / self._num_next),
            perplexity=math.exp(self._loss / self._num_next),
            kl_divergence=self._divergence / self._num_tokens,
            top1_agreement=self._num_agreed / self._num_tokens,
        )


def _predict(model: LoadedModel, token_ids_T: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Start and log-probabilities [T, V] of each step, read in order."""
    block_tokens = model.geometry.block_tokens
    num_blocks = -(-len(token_ids_T) // block_tokens)
    memory = HostMemory(np.zeros(num_blocks * model.geometry.block_bytes, np.uint8), model.geometry)
    batch = StepBatch(max_tokens=_STEP_TOKENS, max_sequences=1, max_blocks=num_blocks)
    blocks = list(range(num_blocks))
    for start in range(0, len(token_ids_T), _STEP_TOKENS):
        batch.clear()
        batch.add(token_ids_T[start : start + _STEP_TOKENS], first_position=start, blocks=blocks, logits="all")
        logits_TV = model.decoder.forward(batch, memory)
        shifted_TV = logits_TV - logits_TV.max(axis=1, keepdims=True)
        log_sum_T1 = np.log(np.exp(shifted_TV).sum(axis=1, keepdims=True, dtype=np.float64))
        yield start, shifted_TV - log_sum_T1.astype(np.float32)
