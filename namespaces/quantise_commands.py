"""Re-encoding what a namespace has cached (namespaces/quantisation.py). A command of the pool itself."""

from __future__ import annotations

import msgspec

from remora.namespaces.command_base import Answer, Command
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.ids import NamespaceId

#: Bytes that one round reads: a hundredth of a second of re-encoding, during which the pool answers nobody.
ROUND_BYTES = 8 * 1024 * 1024


class KVFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A shape of KV, and what names KV of it (namespaces/hashing.py: kv_fingerprint)."""

    geometry: KVGeometry
    fingerprint: bytes


class Quantise(Command, frozen=True, kw_only=True, tag=True):
    """One round: re-encodes cached blocks of a namespace, and of all below it, from other formats of the same model
    into the target, the one that the namespace has now, and frees those that nobody uses. To be said again until
    nothing happens."""

    namespace_id: NamespaceId
    target: KVFormat
    sources: tuple[KVFormat, ...]
    #: About so many bytes of source blocks in this round, at least one block.
    max_bytes: int = ROUND_BYTES


class Quantised(Answer, frozen=True, kw_only=True, tag=True):
    #: Blocks that were written in the target's precision, and blocks that were freed for it.
    num_converted_blocks: int = 0
    num_freed_blocks: int = 0
    #: Cached blocks of other formats that are left: somebody uses what stands behind them, or there was no room.
    num_left_blocks: int = 0
    #: What the namespace and all below it held, used and cached, before and after.
    before_bytes: int = 0
    after_bytes: int = 0
