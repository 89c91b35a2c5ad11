"""What a request does to the model's logits before a token is chosen: penalties, bias, bans."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from remora.deployments.engine.messages import SamplingParams

Float32 = NDArray[np.float32]


class LogitShaper:
    """Repetition, frequency and presence penalties, then logit bias, of one choice.

    Repetition counts prompt and output, the others output only, as in vLLM and Hugging Face. State is the set of seen
    tokens and their counts, kept as arrays so that a step costs one indexed operation.
    """

    __slots__ = ("_bias_ids", "_bias_values", "_counts", "_ids", "_index", "_num_seen", "_params", "is_neutral")

    def __init__(self, params: SamplingParams, prompt_token_ids: NDArray[np.int32]) -> None:
        self._params = params
        bias = dict(params.logit_bias)
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        counts_tokens = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        #: True if `apply` would change nothing.
        self.is_neutral = not counts_tokens and not bias
        seen = np.unique(prompt_token_ids) if params.repetition_penalty != 1.0 else np.empty(0, np.int32)
        self._index: dict[int, int] | None = None
        self._num_seen = len(seen)
        if counts_tokens:
            self._index = {token_id: i for i, token_id in enumerate(seen.tolist())}
        self._ids = np.zeros(max(16, 2 * len(seen)), np.int64)
        self._ids[: len(seen)] = seen
        #: How often each seen token stands in the output; 0 for tokens of the prompt alone.
        self._counts = np.zeros(len(self._ids), np.float32)

    def push(self, token_id: int) -> None:
        """Counts one token of the output."""
        if self._index is None:
            return
        at = self._index.get(token_id)
        if at is None:
            at = self._index[token_id] = self._num_seen
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[at] = token_id
            self._num_seen += 1
        self._counts[at] += 1.0

    def apply(self, logits_V: Float32) -> None:
        """Changes the row in place."""
        params = self._params
        if self._num_seen:
            ids, counts = self._ids[: self._num_seen], self._counts[: self._num_seen]
            values = logits_V[ids]
            if params.repetition_penalty != 1.0:
                penalty = np.float32(params.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            if params.frequency_penalty:
                values -= np.float32(params.frequency_penalty) * counts
            if params.presence_penalty:
                values -= np.float32(params.presence_penalty) * (counts > 0)
            logits_V[ids] = values
        if len(self._bias_ids):
            logits_V[self._bias_ids] += self._bias_values


def ban(logits_V: Float32, token_ids: Iterable[int]) -> None:
    """Makes tokens impossible, unless nothing else would be left: then they stay (a grammar that is at its end)."""
    ids = np.fromiter(token_ids, np.int64)
    kept = logits_V[ids]
    logits_V[ids] = -np.inf
    if logits_V.max() == -np.inf:
        logits_V[ids] = kept
