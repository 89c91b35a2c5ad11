"""Logits → tokens, for all rows of a step.

Rows are looked at one by one wherever floating point could tell: a row's token depends on its own logits, parameters
and draw, never on its neighbours. What all rows need (the largest logit) is one call for the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remora.deployments.engine.draws import uniform
from remora.deployments.engine.logits import Float32, LogitShaper, ban
from remora.deployments.engine.messages import SamplingParams, TokenLogprob
from remora.kernels.base import WEIGHT_PIECE

Int64 = NDArray[np.int64]
LogSumExp = Callable[[Float32], Float32]
#: (logits_V, largest, 1 / temperature, out weights_V, out piece_sums_P): see `weigh_row`.
Weigh = Callable[[Float32, float, float, Float32, Float32], None]

#: Below it sampling is greedy (vLLM's bound): the quotient would overflow.
_LEAST_TEMPERATURE = 1e-5
#: The vocabulary is seen as this many rows to bound what top_k can keep.
_TOP_ROWS = 32


@dataclass(slots=True, kw_only=True)
class SampleRow:
    """One row to sample: whose it is and what restricts it."""

    params: SamplingParams
    shaper: LogitShaper
    seed: int
    choice_index: int
    #: Position of the token to be chosen; with seed and choice it fixes the draw.
    position: int
    #: True where the grammar allows a token; None: no grammar.
    allowed_V: NDArray[np.bool_] | None = None
    #: Tokens that may not come now (ends before min_tokens), unless nothing else is left.
    banned_token_ids: Collection[int] = ()


@dataclass(slots=True, kw_only=True)
class Sampled:
    """The token chosen for a row; `error` says why there is none."""

    token_id: int = -1
    #: The chosen token, then the top alternatives (the chosen one among them if it is one); empty if not asked for.
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


class Sampler:
    """Samples steps. Keeps scratch rows, so that a step allocates little of the vocabulary's size; one caller."""

    def __init__(self, vocab_size: int, log_sum_exp: LogSumExp | None = None, weigh: Weigh | None = None) -> None:
        """`log_sum_exp` normalises logprobs, `weigh` makes weights of logits; None: in numpy."""
        self._log_sum_exp = log_sum_exp if log_sum_exp is not None else log_sum_exp_rows
        self._shaped_V = np.empty(vocab_size, np.float32)
        self._weights_V = np.empty(vocab_size, np.float32)
        self._weigh = weigh if weigh is not None else weigh_row
        self._piece_sums_P = np.empty(-(-vocab_size // WEIGHT_PIECE), np.float32)

    def sample(self, logits_RV: Float32, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Chooses a token for each row; `logits_RV` is not changed.

        Order: penalties, bias, grammar, bans, temperature, min_p, top_k, top_p; logprobs are the model's own, before
        all of these. A row with a NaN or no finite maximum gets an error.
        """
        best_R = logits_RV.argmax(axis=1)
        finite_R = np.isfinite(logits_RV[np.arange(len(rows)), best_R]).tolist()
        best = best_R.tolist()
        normalisers = self._normalisers(logits_RV, rows)
        out = []
        for i, row in enumerate(rows):
            if not finite_R[i]:
                out.append(Sampled(error="the model's logits are not finite (NaN or infinity)"))
                continue
            try:
                token_id = self._choose(logits_RV[i], best[i], row)
            except (ValueError, IndexError, FloatingPointError) as error:
                out.append(Sampled(error=f"the token could not be chosen: {error}"))
                continue
            if token_id is None:
                out.append(Sampled(error="the grammar and the sampling parameters leave no token to choose"))
            elif row.params.logprobs is None:
                out.append(Sampled(token_id=token_id))
            else:
                logprobs = _logprobs(logits_RV[i], normalisers[i], token_id, row.params.logprobs)
                out.append(Sampled(token_id=token_id, logprobs=logprobs))
        return out

    def _choose(self, logits_V: Float32, best: int, row: SampleRow) -> int | None:
        params = row.params
        if not row.shaper.is_neutral or row.allowed_V is not None or row.banned_token_ids:
            np.copyto(self._shaped_V, logits_V)
            logits_V = self._shaped_V
            row.shaper.apply(logits_V)
            if row.allowed_V is not None:
                np.copyto(logits_V, -np.inf, where=~row.allowed_V)
            if row.banned_token_ids:
                ban(logits_V, row.banned_token_ids)
            best = int(logits_V.argmax())
            if not np.isfinite(logits_V[best]):
                return None
        if params.temperature < _LEAST_TEMPERATURE or params.top_k == 1:
            return best
        draw = uniform(row.seed, row.choice_index, row.position)
        if 0 < params.top_k < len(logits_V):
            ids_K = _top_ids(logits_V, params.top_k)
            weights_K = _weights(logits_V[ids_K], logits_V[best], params.temperature)
            return _draw(ids_K, weights_K, params, draw)
        weights_V, piece_sums_P = self._weights_V, self._piece_sums_P
        self._weigh(logits_V, float(logits_V[best]), 1.0 / params.temperature, weights_V, piece_sums_P)
        if params.min_p > 0.0:
            ids_K = np.flatnonzero(weights_V >= np.float32(params.min_p))
            return _draw(ids_K, weights_V[ids_K], params, draw)
        if params.top_p >= 1.0:
            return _draw_from_pieces(weights_V, piece_sums_P, draw)
        mass = float(piece_sums_P.sum(dtype=np.float64))
        # Weights below the floor add up to less than 1 - top_p of the mass: the nucleus lies above. 0.999: rounding.
        floor = 0.999 * (1.0 - params.top_p) * mass / len(weights_V)
        ids_K = np.flatnonzero(weights_V >= np.float32(floor))
        return _draw(ids_K, weights_V[ids_K], params, draw, mass=mass)

    def _normalisers(self, logits_RV: Float32, rows: Sequence[SampleRow]) -> dict[int, float]:
        """log Σ exp of the rows that want logprobs."""
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not wanted:
            return {}
        sums = self._log_sum_exp(logits_RV if len(wanted) == len(rows) else logits_RV[wanted])
        return dict(zip(wanted, sums.tolist(), strict=True))


def log_sum_exp_rows(logits_RV: Float32) -> Float32:
    """log Σ exp of each row."""
    largest_R = logits_RV.max(axis=1)
    with np.errstate(invalid="ignore"):  # rows that are not finite get NaN; they are refused elsewhere
        sums = [np.exp(row - largest).sum(dtype=np.float64) for row, largest in zip(logits_RV, largest_R, strict=True)]
    result: Float32 = (largest_R + np.log(sums)).astype(np.float32)
    return result


def _logprobs(logits_V: Float32, normaliser: float, token_id: int, num_top: int) -> tuple[TokenLogprob, ...]:
    chosen = TokenLogprob(token_id=token_id, logprob=float(logits_V[token_id]) - normaliser)
    if num_top <= 0:
        return (chosen,)
    ids_K = _top_ids(logits_V, min(num_top, len(logits_V)))
    # Stable: of equal logits the lowest id comes first.
    ids_K = ids_K[np.argsort(-logits_V[ids_K], kind="stable")][:num_top]
    return (chosen, *(TokenLogprob(token_id=int(i), logprob=float(logits_V[i]) - normaliser) for i in ids_K))


def weigh_row(logits_V: Float32, largest: float, factor: float, weights_V: Float32, piece_sums_P: Float32) -> None:
    """weights = exp((logits - largest) * factor), and the sum of every 256 of them."""
    np.subtract(logits_V, np.float32(largest), out=weights_V)
    np.multiply(weights_V, np.float32(factor), out=weights_V)
    np.exp(weights_V, out=weights_V)
    np.add.reduceat(weights_V, np.arange(0, len(weights_V), WEIGHT_PIECE), out=piece_sums_P)


def _weights(logits: Float32, largest: np.float32, temperature: float) -> Float32:
    """Probabilities up to a common factor; that of the largest logit is 1."""
    weights: Float32 = np.exp((logits - largest) * np.float32(1.0 / temperature))
    return weights


def _top_ids(logits_V: Float32, num_top: int) -> Int64:
    """Ids of the `num_top` largest logits and of all that equal the last of them, ascending."""
    num_columns = len(logits_V) // _TOP_ROWS
    if num_top < num_columns:
        # Each column's largest is one of V: the k-th largest of these is a lower bound of the k-th largest of all.
        maxima = logits_V[: num_columns * _TOP_ROWS].reshape(_TOP_ROWS, num_columns).max(axis=0)
        bound = np.partition(maxima, num_columns - num_top)[num_columns - num_top]
        ids_K: Int64 = np.flatnonzero(logits_V >= bound)
    else:
        ids_K = np.arange(len(logits_V))
    logits_K = logits_V[ids_K]
    kth = np.partition(logits_K, len(ids_K) - num_top)[len(ids_K) - num_top]
    return np.compress(logits_K >= kth, ids_K)


def _draw(ids_K: Int64, weights_K: Float32, params: SamplingParams, draw: float, mass: float | None = None) -> int:
    """Applies min_p and top_p, then picks by inverse distribution in the order of ids. `mass`: of what top_p sees."""
    if params.min_p > 0.0:
        is_kept = weights_K >= np.float32(params.min_p)
        ids_K, weights_K = ids_K[is_kept], weights_K[is_kept]
    if params.top_p < 1.0:
        if mass is None:
            mass = float(weights_K.sum(dtype=np.float64))
        descending = np.sort(weights_K)[::-1]
        mass_before = np.cumsum(descending, dtype=np.float64) - descending
        num_kept = max(1, int(np.searchsorted(mass_before, params.top_p * mass, side="left")))
        is_kept = weights_K >= descending[num_kept - 1]
        ids_K, weights_K = ids_K[is_kept], weights_K[is_kept]
    cumulative = np.cumsum(weights_K, dtype=np.float64)
    return int(ids_K[_pick(cumulative, draw * cumulative[-1])])


def _draw_from_pieces(weights_V: Float32, piece_sums: Float32, draw: float) -> int:
    cumulative = np.cumsum(piece_sums, dtype=np.float64)
    target = draw * float(cumulative[-1])
    piece = _pick(cumulative, target)
    start = piece * WEIGHT_PIECE
    before = float(cumulative[piece - 1]) if piece else 0.0
    return start + _pick(np.cumsum(weights_V[start : start + WEIGHT_PIECE], dtype=np.float64), target - before)


def _pick(cumulative: NDArray[np.float64], target: float) -> int:
    """The first entry whose cumulative weight exceeds `target`: never one of weight 0, whatever was rounded."""
    return int(np.searchsorted(cumulative, min(target, np.nextafter(cumulative[-1], 0.0)), side="right"))
