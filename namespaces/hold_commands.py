"""How somebody outside a pool reads its sealed blocks: they are held for a bounded time (namespaces/holds.py).

    Hold ─► Held        the leading blocks of a chain that are here, where they lie, and until when
    Unhold ─► Unheld

Commands of the pool itself, made for readers that have no lease there: replicas of other pools and nodes.
"""

from __future__ import annotations

from remora.namespaces.command_base import Answer, Command
from remora.platform.base.ids import BlockHash, HoldId, NamespaceId

#: Longest that blocks are held for one reader, whatever it asks for: one that dies keeps them no longer.
MAX_HOLD_S = 30.0


class Hold(Command, frozen=True, kw_only=True, tag=True):
    """Asks for the longest cached prefix of a chain, to be neither evicted nor moved. An id is used once; the same id
    again gets the same answer."""

    hold_id: HoldId
    namespace_id: NamespaceId
    #: Of whoever wants the blocks: only KV of equal content is found.
    fingerprint: bytes
    #: Chain hashes from the first block on.
    hashes: tuple[BlockHash, ...]
    hold_s: float = MAX_HOLD_S


class Unhold(Command, frozen=True, kw_only=True, tag=True):
    """The reader is done. Unknown ids are ignored: they have run out."""

    hold_ids: tuple[HoldId, ...]


class Held(Answer, frozen=True, kw_only=True, tag=True):
    """Block i of the chain lies at `blocks[i]`, unchanged, until `until_s`. Nothing is held when `blocks` is empty."""

    blocks: tuple[int, ...] = ()
    block_bytes: int = 0
    #: On the pool's clock (CLOCK_MONOTONIC of its node).
    until_s: float = 0.0


class Unheld(Answer, frozen=True, kw_only=True, tag=True):
    num_ended: int
