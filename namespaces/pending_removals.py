"""Ranges that were taken out of a session's log between two turns.

The next turn is computed on the KV of the log as it was: the engine takes the same tokens out of it before it goes on
(namespaces/edits.py). So what was removed is kept until that turn is in the log.
"""

from __future__ import annotations

from typing import Final

import msgspec

from remora.namespaces.edits import Removal

TOKEN_BYTES: Final = 4


class PendingRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """In positions of the log right before it; several are in the order in which they were made."""

    start: int
    token_bytes: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.token_bytes) // TOKEN_BYTES


Pending = tuple[PendingRemoval, ...]


def without(token_bytes: bytes, start: int, end: int) -> bytes:
    """A packed log without the tokens [start, end)."""
    return token_bytes[: start * TOKEN_BYTES] + token_bytes[end * TOKEN_BYTES :]


def restored(token_bytes: bytes, pending: Pending) -> bytes:
    """The packed log as it was before all of them."""
    for removal in reversed(pending):
        cut = removal.start * TOKEN_BYTES
        token_bytes = token_bytes[:cut] + removal.token_bytes + token_bytes[cut:]
    return token_bytes


def cut_pending(pending: Pending, num_tokens: int) -> tuple[Pending, int]:
    """What still matters for the first `num_tokens` tokens, and how long the log was before for those."""
    kept: list[PendingRemoval] = []
    for removal in reversed(pending):
        if removal.start < num_tokens:
            kept.append(removal)
            num_tokens += removal.end - removal.start
    return tuple(reversed(kept)), num_tokens


def removals_of(pending: Pending, num_tokens: int) -> tuple[Removal, ...]:
    """For the engine; `num_tokens` are in the log before all of them."""
    found = []
    for removal in pending:
        found.append(Removal(at=num_tokens, start=removal.start, end=removal.end))
        num_tokens -= removal.end - removal.start
    return tuple(found)
