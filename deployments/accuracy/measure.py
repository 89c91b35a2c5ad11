"""How far a precision of weights or KV, or another model's KV, moves predictions from a reference, on one text.

Both models read the text through their own decoder in steps of a few hundred tokens, as a prompt is read, so that later
tokens see the earlier ones through KV in its precision. Shapes: T tokens of the text, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from remora.deployments.models.loaded_model import LoadedModel
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
        reading = _Reading(reference, _token_ids(reference, text))
        kept = np.memmap(
            Path(folder) / "reference", np.float32, mode="w+", shape=(len(reading.token_ids_T), reference.vocab_size)
        )
        for start in reading.starts:
            log_probabilities_TV = reading.read(start)
            kept[start : start + len(log_probabilities_TV)] = log_probabilities_TV
        token_ids = reading.token_ids_T
        del reference, reading
        sums = _Sums()
        reading = _Reading(load_model(), token_ids)
        for start in reading.starts:
            log_probabilities_TV = reading.read(start)
            sums.add(kept[start : start + len(log_probabilities_TV)], log_probabilities_TV, token_ids[start + 1 :])
        del kept
    return sums.accuracy()


def measure_adopted(load_other: Load, load_model: Load, text: str) -> Accuracy:
    """What KV that another model computed costs a model that goes on behind it, against its own KV.

    Before each step all KV is the other's; the step is the model's, as where a session goes on. Not counted are the
    tokens of the first step, which has none before it. Both have KV of one geometry, and one tokenizer.

    Raises InvalidRequest for a text of no more than one step.
    """
    other = load_other()
    token_ids = _token_ids(other, text)
    if len(token_ids) <= _STEP_TOKENS:
        raise InvalidRequest(
            f"text: {len(token_ids)} tokens; more than {_STEP_TOKENS} are needed to go on behind them", field="text"
        )
    written = _Reading(other, token_ids)
    for start in written.starts:
        written.read(start)
    kv = written.memory.data
    del other, written
    model, sums = load_model(), _Sums()
    own, adopted = _Reading(model, token_ids), _Reading(model, token_ids)
    adopted.memory.data[:] = kv
    for start in own.starts:
        reference_TV = own.read(start)
        if start:
            sums.add(reference_TV, adopted.read(start), token_ids[start + 1 :])
            adopted.memory.data[:] = kv
    return sums.accuracy()


def _token_ids(model: LoadedModel, text: str) -> NDArray[np.int32]:
    """As much of the text as the model's context takes. Raises InvalidRequest for fewer than MIN_TOKENS tokens."""
    token_ids = np.asarray(model.tokenizer.encode(text)[: model.max_model_len], np.int32)
    if len(token_ids) < MIN_TOKENS:
        raise InvalidRequest(f"text: {len(token_ids)} tokens; at least {MIN_TOKENS} are needed", field="text")
    return token_ids


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


class _Reading:
    """A text that a model reads step by step, into memory of its own."""

    def __init__(self, model: LoadedModel, token_ids_T: NDArray[np.int32]) -> None:
        num_blocks = -(-len(token_ids_T) // model.geometry.block_tokens)
        self.token_ids_T = token_ids_T
        self.starts = range(0, len(token_ids_T), _STEP_TOKENS)
        self.memory = HostMemory(np.zeros(num_blocks * model.geometry.block_bytes, np.uint8), model.geometry)
        self._decoder = model.decoder
        self._batch = StepBatch(max_tokens=_STEP_TOKENS, max_sequences=1, max_blocks=num_blocks)
        self._blocks = list(range(num_blocks))

    def read(self, start: int) -> NDArray[np.float32]:
        """Log-probabilities [T, V] of the step that starts there, behind the KV that is in the memory."""
        self._batch.clear()
        token_ids_T = self.token_ids_T[start : start + _STEP_TOKENS]
        self._batch.add(token_ids_T, first_position=start, blocks=self._blocks, logits="all")
        logits_TV = self._decoder.forward(self._batch, self.memory)
        shifted_TV = logits_TV - logits_TV.max(axis=1, keepdims=True)
        log_sum_T1 = np.log(np.exp(shifted_TV).sum(axis=1, keepdims=True, dtype=np.float64))
        log_probabilities_TV: NDArray[np.float32] = shifted_TV - log_sum_T1.astype(np.float32)
        return log_probabilities_TV
