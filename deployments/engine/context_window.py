"""One sequence's context: how long it may be, what leaves it when, and what its KV then depends on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from remora.namespaces.edits import (
    ContextOutcome,
    ContextPlan,
    Edits,
    Removal,
    after_removal,
    kept_end,
    recomputed,
)

_PLAIN = ContextPlan()


class ContextWindow:
    """Removals happen when exactly so many tokens are computed as they say, whatever the steps were: the outcome is a
    function of the tokens alone. A full context rolls: of what is not kept, the older half leaves."""

    def __init__(self, plan: ContextPlan | None, *, max_model_len: int) -> None:
        plan = plan or _PLAIN
        self.limit_tokens = min(plan.limit_tokens or max_model_len, max_model_len)
        self.rolls = plan.keep_tokens is not None
        #: At least a quarter of the context leaves at a time.
        self._keep_tokens = min(plan.keep_tokens or 0, self.limit_tokens // 2)
        self._removals = list(plan.removals)
        self.edits: Edits = plan.edits
        self._given_edits = plan.edits
        self._removed: list[tuple[int, int]] = []
        self.num_removed_tokens = 0
        #: Tokens that are computed when the next removal is due; looked at in every step.
        self.next_at = self._next_at()

    @property
    def next_removal(self) -> Removal | None:
        """None: nothing will leave any more."""
        if self._removals:
            return self._removals[0]
        if not self.rolls:
            return None
        keep, limit = self._keep_tokens, self.limit_tokens
        return Removal(at=limit, start=keep, end=keep + max(1, (limit - keep) // 2))

    def _next_at(self) -> int:
        removal = self.next_removal
        return sys.maxsize if removal is None else removal.at

    @property
    def kept_end(self) -> int:
        """Tokens at the beginning that must come from the cache; otherwise `forget` is due."""
        return kept_end(self.edits)

    def room(self, num_prompt_tokens: int) -> int | None:
        """Tokens that fit behind the prompt; None: no end."""
        if self.rolls:
            return None
        return self.limit_tokens - num_prompt_tokens + sum(removal.num_removed for removal in self._removals)

    def remove(self, removal: Removal, token_ids: Sequence[int], *, kv_kept: bool) -> None:
        """The next removal has happened; `token_ids` are the `removal.at` tokens before it."""
        if kv_kept:
            self.edits = after_removal(self.edits, token_ids, removal)
        else:
            self.edits = recomputed(self.edits, removal.start)
        if self._removals:
            del self._removals[0]
        self._removed.append((removal.start, removal.end))
        self.num_removed_tokens += removal.num_removed
        self.next_at = self._next_at()

    def forget(self, num_cached_tokens: int) -> None:
        """Kept KV behind so many tokens is lost: it is computed anew, and named so."""
        self.edits = recomputed(self.edits, num_cached_tokens)

    def outcome(self) -> ContextOutcome | None:
        """What changed; None if nothing did."""
        if not self._removed and self.edits == self._given_edits:
            return None
        return ContextOutcome(edits=self.edits, removed=tuple(self._removed))
