"""What steps take, learned from those that were made: so much whatever is in them, so much for each sequence that
decodes, and so much for each token of prompts.

The three are fitted by least squares, steps long ago counting less and less. Only their ratios matter to who asks, so
that a machine that is slower for a while changes nothing. Each step counts by the part of its time that the fit gets
wrong: one that was interrupted for long weighs no more than another. Where steps look too much alike to tell the
parts from each other, what is usual on a CPU fills in; a GPU's first steps show that it is otherwise there.
"""

from __future__ import annotations

#: What a step counts, when the next one comes, for each that it counted before: about fifty are remembered.
_KEPT = 0.98
#: Usual costs in tokens of prompts: of a step itself, and of a sequence that decodes.
_USUAL_FIXED_TOKENS, _USUAL_DECODE_TOKENS = 8.0, 1.5
#: So many sequences that decode are believed to cost what is usual, and how firmly: a step that was made counts 1.
_USUAL_SEQUENCES, _USUAL_WEIGHT = 8.0, 0.25
#: The answer where tokens of prompts seem to cost nothing.
_MOST_TOKENS = 1e6


class StepCosts:
    """Engine thread only."""

    def __init__(self) -> None:
        #: Sums over steps of the products of (1, sequences that decode, tokens of prompts), each over the step's time.
        self._products = [0.0] * 6
        self._sums = [0.0] * 3
        self._time_s = 0.0

    def observe(self, num_decoding: int, num_prompt_tokens: int, step_s: float) -> None:
        """Takes a step into account that computed one token of each decoding sequence, and these of prompts."""
        if step_s <= 0 or num_decoding + num_prompt_tokens == 0:
            return
        one, decoding, prompts = 1.0 / step_s, num_decoding / step_s, num_prompt_tokens / step_s
        new = (one * one, one * decoding, one * prompts, decoding * decoding, decoding * prompts, prompts * prompts)
        self._products = [_KEPT * old + each for old, each in zip(self._products, new, strict=True)]
        self._sums = [_KEPT * old + each for old, each in zip(self._sums, (one, decoding, prompts), strict=True)]
        self._time_s = step_s if self._time_s == 0 else _KEPT * self._time_s + (1 - _KEPT) * step_s

    def tokens_worth(self, num_sequences: int) -> float:
        """How many tokens of prompts take as long as a step in which so many sequences decode, and nothing else."""
        if self._time_s == 0:
            return _USUAL_FIXED_TOKENS + _USUAL_DECODE_TOKENS * num_sequences
        fixed_s, decode_s, prompt_s = self._solve()
        step_s = max(0.0, fixed_s + decode_s * num_sequences)
        return min(step_s / prompt_s, _MOST_TOKENS) if prompt_s > 0 else _MOST_TOKENS

    def _solve(self) -> tuple[float, float, float]:
        """Seconds of a step itself, of a sequence that decodes, and of a token of a prompt."""
        a, b, c, e, f, i = self._products
        usual = _USUAL_WEIGHT / self._time_s**2
        fixed, decode, many = _USUAL_FIXED_TOKENS, _USUAL_DECODE_TOKENS, _USUAL_SEQUENCES**2
        a += usual
        c -= usual * fixed
        e += usual * many
        f -= usual * many * decode
        i += usual * (fixed**2 + many * decode**2)
        u, v, w = self._sums
        # The symmetric matrix [[a, b, c], [b, e, f], [c, f, i]] is positive definite: what is usual sees to that.
        aa, ab, ac = e * i - f * f, c * f - b * i, b * f - c * e
        ee, ef, ii = a * i - c * c, b * c - a * f, a * e - b * b
        determinant = a * aa + b * ab + c * ac
        return (
            (aa * u + ab * v + ac * w) / determinant,
            (ab * u + ee * v + ef * w) / determinant,
            (ac * u + ef * v + ii * w) / determinant,
        )
