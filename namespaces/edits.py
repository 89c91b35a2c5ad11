"""Edits of a token log: what was taken out of the middle, and what that means for the KV of the rest (design rule 4).

    tokens  a b c d e f g h      remove [2, 5), close the gap      a b f g h
    KV      of all eight                                           f g h still depend on c d e

KV that was kept through an edit, and whatever is computed behind it, is named by a chain of hashes that goes through
the edit's digest (namespaces/hashing.py), never by the plain chain of the tokens that are left. A digest says exactly
what the KV depends on. When kept KV is lost, it cannot be had again from the tokens that are left: they are computed as
they stand, and an edit of the kind "recomputed" says so and names the result.

KV that was taken over from another fingerprint is named in the same way (hashing.Derivation), and so is what is
computed behind it:

    KV      a b c d | e f         a to d of another model, e f computed behind them: adopted at 0, recomputed at 4
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Literal

import msgspec

from remora.namespaces.hashing import Derivation, DerivedKind
from remora.platform.base.errors import IntegrityError

EditKind = Literal["removed", "recomputed", DerivedKind]
_RECOMPUTED: Final = b"recomputed"


class EditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One edit as far as it still matters."""

    #: First token whose KV it touched.
    position: int
    #: KV of the tokens up to here was kept; behind it everything was computed after the edit.
    end: int
    digest: bytes
    kind: EditKind


#: By rising position; an edit contains all earlier ones at its position or behind it.
Edits = tuple[EditRecord, ...]


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) leave once exactly the first `at` tokens are computed."""

    at: int
    start: int
    end: int

    @property
    def num_removed(self) -> int:
        return self.end - self.start


class ContextPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a session's owner wants of its context."""

    #: "roll": a full context loses the older half of what is not kept; "error": it is refused or ends.
    overflow: Literal["error", "roll"] = "error"
    #: Tokens at the beginning that a rolling context never loses.
    keep_tokens: int = 0
    #: Most bytes of KV of one session; None: as much as the model's context takes.
    cache_limit_bytes: int | None = None


class ContextPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a sequence's context differs from its plain tokens, and what happens when it is full."""

    #: Most tokens of the context; None: the model's.
    limit_tokens: int | None = None
    #: What stays at the beginning when the context is full and the oldest of the rest leaves; None: it ends instead.
    keep_tokens: int | None = None
    #: Of the tokens as they are given.
    edits: Edits = ()
    #: Still to be done, in order.
    removals: tuple[Removal, ...] = ()

    def horizon(self, num_tokens: int, max_model_len: int) -> int:
        """Tokens at the beginning that can be computed before some leave."""
        if self.removals:
            return min(num_tokens, self.removals[0].at)
        if self.keep_tokens is not None:
            return min(num_tokens, self.limit_tokens or max_model_len, max_model_len)
        return num_tokens


class ContextOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a context."""

    edits: Edits
    #: Ranges that left, each in positions of its own time.
    removed: tuple[tuple[int, int], ...]


def chain_edits(edits: Edits) -> list[tuple[int, bytes]]:
    """For `chain_hashes`."""
    return [(edit.position, edit.digest) for edit in edits]


def kept_end(edits: Edits) -> int:
    """Tokens whose KV must be found in a cache, because it depends on tokens that are gone."""
    return max((edit.end for edit in edits), default=0)


def after_removal(edits: Edits, token_ids: Sequence[int], removal: Removal) -> Edits:
    """The edits of what is left. `token_ids` are those computed before the removal."""
    if not 0 <= removal.start < removal.end <= len(token_ids) == removal.at:
        raise IntegrityError(f"{removal} does not fit {len(token_ids)} tokens")
    digest = blake2b(struct.pack("<QQ", removal.start, removal.end), digest_size=16, person=b"remora-removal1")
    for edit in edits:
        digest.update(struct.pack("<QQ", edit.position, len(edit.digest)) + edit.digest)
    digest.update(b"tokens" + struct.pack(f"<{len(token_ids)}I", *token_ids))
    record = EditRecord(
        position=removal.start,
        end=len(token_ids) - removal.num_removed,
        digest=digest.digest(),
        kind="removed",
    )
    return (*_before(edits, removal.start), record)


def derived(edits: Edits, derivation: Derivation, start: int, end: int) -> Edits:
    """KV of [start, end) is taken over from the chain that has these edits, none of them before `start`; behind it
    everything is computed. Both are multiples of the block length."""
    if not 0 <= start < end or any(edit.position < start for edit in edits):
        raise IntegrityError(f"[{start}, {end}) cannot be taken over from a chain with {len(edits)} edits")
    record = EditRecord(position=start, end=end, digest=derivation.digest, kind=derivation.kind)
    return recomputed((record, *edits), end)


def first_derived(edits: Edits, default: int) -> int:
    """First token whose KV was taken over from another fingerprint."""
    return next((edit.position for edit in edits if edit.kind in ("adopted", "converted")), default)


def recomputed(edits: Edits, position: int) -> Edits:
    """KV from `position` on was lost, or not kept, and is computed from the tokens that are left. Where nothing but KV
    that was taken over is lost, with all of it, that makes plain KV."""
    if _is_plain_without(edits, position):
        return ()
    digest = _RECOMPUTED + struct.pack("<Q", position)
    record = EditRecord(position=position, end=position, digest=digest, kind="recomputed")
    return (*_before(edits, position), record)


def truncated(edits: Edits, num_tokens: int) -> Edits:
    """Of the first `num_tokens` tokens; what will follow them is not what followed them."""
    left = _before(edits, num_tokens)
    if left and kept_end(edits) > num_tokens:
        return recomputed(edits, num_tokens)
    return left


def _is_plain_without(edits: Edits, position: int) -> bool:
    kinds = {edit.kind for edit in edits}
    return "removed" not in kinds and kinds != {"recomputed"} and bool(kinds) and edits[0].position >= position


def _before(edits: Edits, position: int) -> Edits:
    return tuple(
        msgspec.structs.replace(edit, end=min(edit.end, position)) for edit in edits if edit.position < position
    )
