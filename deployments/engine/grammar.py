"""Constrained output: which tokens a JSON schema allows next.

Compiling and filling masks run on a thread of their own (llguidance drops the GIL): masks are filled while the model's
forward pass runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from remora.deployments.engine.base import EngineTokenizer
from remora.deployments.engine.messages import Grammar
from remora.platform.base.errors import InvalidRequest, RemoraError

#: Between JSON's tokens. Bounded, because a weak model would otherwise write spaces until its budget is gone.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,40}"


class GrammarFault(RemoraError):
    """The grammar engine gave up on a sequence (too complex, or a token that does not belong); ends that sequence."""

    code = "grammar_fault"


class GrammarMatcher:
    """One choice's place in its grammar. One thread at a time."""

    __slots__ = ("_bits", "_fault", "_matcher", "_num_logits")

    def __init__(self, matcher: Any, num_logits: int) -> None:
        self._matcher = matcher
        self._num_logits = num_logits
        self._bits = np.zeros((num_logits + 31) // 32, np.int32)
        self._fault: str | None = None

    def copy(self) -> GrammarMatcher:
        """Another choice's matcher at the same place."""
        return GrammarMatcher(self._matcher.deep_copy(), self._num_logits)

    def fill_mask(self) -> None:
        """Computes the mask of the next token. A fault is kept for `allowed`, so that it ends only this sequence."""
        try:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        except Exception as error:  # whatever the library raises concerns this sequence alone
            self._fault = str(error)

    def allowed(self) -> NDArray[np.bool_]:
        """True where a token may come next, [num_logits]; as of the last `fill_mask`. Raises GrammarFault."""
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._num_logits].view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Moves on by one token. Raises GrammarFault if the grammar does not allow it."""
        if not self._matcher.consume_token(token_id):
            self._check()
            raise GrammarFault(f"token {token_id} does not belong to the grammar")

    @property
    def is_complete(self) -> bool:
        """Nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._fault is None and self._matcher.is_error():
            self._fault = str(self._matcher.get_error()).splitlines()[0]
        if self._fault is not None:
            raise GrammarFault(f"the grammar cannot be followed any further: {self._fault}")


def compile_grammar(grammar: Grammar, tokenizer: EngineTokenizer, num_logits: int) -> GrammarMatcher:
    """A matcher at the grammar's start. Raises InvalidRequest for a schema that is wrong or not supported."""
    text = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    try:
        schema = json.loads(text)
        source = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"response_format: the schema is not JSON: {error}", field="response_format") from None
    matcher = LLMatcher(tokenizer.grammar_tokenizer(num_logits), source, log_level=0)
    if matcher.is_error():
        reason = str(matcher.get_error()).splitlines()[0]
        raise InvalidRequest(f"response_format: the schema cannot be used: {reason}", field="response_format")
    return GrammarMatcher(matcher, num_logits)


class GrammarWorker:
    """The grammar thread of an engine."""

    def __init__(self, tokenizer: EngineTokenizer, num_logits: int) -> None:
        self._tokenizer = tokenizer
        self._num_logits = num_logits
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def compile(self, grammar: Grammar) -> Future[GrammarMatcher]:
        """Compiles beside the engine; the future raises InvalidRequest."""
        return self._executor.submit(compile_grammar, grammar, self._tokenizer, self._num_logits)

    def fill_masks(self, matchers: Sequence[GrammarMatcher]) -> Future[None]:
        """Fills the masks of a step; the caller leaves the matchers alone until the future is done."""
        return self._executor.submit(_fill_masks, tuple(matchers))

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def _fill_masks(matchers: tuple[GrammarMatcher, ...]) -> None:
    for matcher in matchers:
        matcher.fill_mask()
