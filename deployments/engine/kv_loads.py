"""Blocks that are copied from another pool, or converted from another precision, instead of being computed.

    admitted ─► loading: a thread beside the engine holds, copies, verifies, converts ─► pieces in its inbox ─► goes on
                         (the run has its blocks; nothing of it is computed)

Only the engine's thread writes to the arena, and only for a run that still has its blocks: a piece that comes late
finds nobody, and changes nothing. Blocks are full and bear names for what they are (block_names.py): they are published
like computed ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from remora.cache_actors.port import BlockLoader, KVSource, LoadedBlocks, LoadEnd, LoadOrder, OtherChain
from remora.deployments.engine.base import KVSibling
from remora.deployments.engine.engine_stats import EngineCounters
from remora.deployments.engine.sequence import Phase, Sequence
from remora.kernels.mover import Mover
from remora.namespaces.commands import Admitted
from remora.namespaces.geometry import KVGeometry
from remora.namespaces.kept_chains import KeptChain
from remora.platform.base.ids import SequenceId

_log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """A pool that may have blocks: as they are wanted, or in a sibling's precision under that chain, or as the source
    says that they are called."""

    source: KVSource
    sibling: KVSibling | None = None
    chain: KeptChain | None = None


class KVLoads:
    """Engine thread only."""

    def __init__(
        self,
        loader: BlockLoader | None,
        own_pool: KVSource | None,
        counters: EngineCounters,
        *,
        post: Callable[[Callable[[], None]], None],
        on_loaded: Callable[[Sequence], None],
        mover: Callable[[Sequence], Mover],
    ) -> None:
        """`post` runs a function in the engine's thread; `on_loaded` hears that a run's load has ended, well or not;
        `mover` is what writes to a sequence's memory."""
        self._loader = loader
        self._own_pool = own_pool
        self._counters = counters
        self._post = post
        self._on_loaded = on_loaded
        self._mover = mover

    def wanted(self, sequence: Sequence, admitted: Admitted) -> list[Wanted]:
        """Where what the pool lacks may be had, in the order in which it is asked for; nothing the second time.

        What this pool has in another precision comes first, then what another pool has as it is wanted, or else in
        another precision.
        """
        live, kept = sequence.live, admitted.kept
        num_cached, source = admitted.num_cached_blocks, live.request.kv_source
        if self._loader is None or live.has_asked_source or num_cached >= _num_loadable(sequence):
            return []
        if source is not None and source.other is not None:
            return [Wanted(source)] if self._may_take(sequence, source.other, num_cached) else []
        chains = sequence.kept_chains()
        found: list[Wanted] = []
        if kept is not None and self._own_pool is not None and kept.num_source_blocks > num_cached:
            number = kept.chain_no
            found.append(Wanted(self._own_pool, live.namespace.siblings[number], chains[number]))
        elif source is not None:
            found.append(Wanted(source))
            found += [Wanted(source, *pair) for pair in zip(live.namespace.siblings, chains, strict=False)]
        return found

    @staticmethod
    def _may_take(sequence: Sequence, other: OtherChain, num_cached: int) -> bool:
        """Whether the model can go on behind that KV, and the request's own blocks before it are there."""
        if other.derivation not in sequence.live.namespace.takes:
            _log.error("%s: KV that this model does not take is not used", sequence.live.request.request_id)
            return False
        return other.first <= num_cached

    def begin(self, sequence: Sequence, wanted: list[Wanted]) -> None:
        """Fills the blocks of a run that has just begun, behind those it found."""
        assert sequence.sequence_id is not None
        sequence.live.has_asked_source = True
        sequence.is_load_pending = True
        self._start(_Load(sequence, sequence.sequence_id, wanted))

    def _start(self, load: _Load) -> None:
        """Asks the next pool, if that makes sense; otherwise the run goes on."""
        sequence = load.sequence
        first = sequence.num_computed_tokens // sequence.block_tokens
        while load.wanted:
            source, sibling, chain = load.now = load.wanted.pop(0)
            # Plain blocks have no place behind converted ones: what they would be called depends on those.
            hashes = tuple(sequence.extend_hashes(_num_loadable(sequence))) if chain is None else chain.hashes
            if source.other is not None:
                hashes = source.other.hashes[: _num_loadable(sequence)]
            if first < len(hashes) and (chain is not None or sequence.block_names.is_plain):
                break
        else:
            sequence.is_load_pending = False
            self._on_loaded(sequence)
            return
        assert self._loader is not None
        load.num_tokens, load.started_unix_ns = 0, time.time_ns()
        namespace, namespace_id, geometry = sequence.live.namespace, sequence.namespace_id, sequence.memory.geometry
        fingerprint, source_geometry = namespace.fingerprint, geometry
        if source.other is not None:
            derivation, namespace_id = source.other.derivation, source.other.namespace_id
            fingerprint, source_geometry = derivation.fingerprint, namespace.takes[derivation]
        elif sibling is not None:
            fingerprint, source_geometry = sibling.fingerprint, sibling.geometry
        load.converts_from = None if source_geometry == geometry else source_geometry
        load.cancel = self._loader.start(
            LoadOrder(
                source=source,
                namespace_id=namespace_id,
                fingerprint=fingerprint,
                hashes=hashes,
                first=first,
                geometry=geometry,
                source_geometry=load.converts_from,
            ),
            lambda loaded: self._post(lambda: self._take(load, loaded)),
            lambda end: self._post(lambda: self._end(load, end)),
        )

    def _take(self, load: _Load, loaded: LoadedBlocks) -> None:
        sequence = load.sequence
        try:
            if not load.is_current:
                load.cancel()
                return
            if loaded.first * sequence.block_tokens != sequence.num_computed_tokens:
                _log.error("%s: loaded blocks do not follow what it has", load.sequence_id)
                load.cancel()
                return
            mover = self._mover(sequence)
            for position, row in enumerate(loaded.data_NB, loaded.first):
                mover.write_block(int(sequence.blocks[position]), row)
                if (chain := load.now.chain) is not None:
                    plain, own = sequence.extend_hashes(position), sequence.live.namespace.fingerprint
                    sequence.block_names.convert(plain, chain.hashes[position], chain.fingerprint, own)
            sequence.num_computed_tokens += len(loaded.data_NB) * sequence.block_tokens
            load.num_tokens += len(loaded.data_NB) * sequence.block_tokens
        finally:
            loaded.give_back()

    def _end(self, load: _Load, end: LoadEnd) -> None:
        self._counters.num_damaged_blocks += end.num_damaged
        if not load.is_current:
            return
        sequence, live, converts_from = load.sequence, load.sequence.live, load.converts_from
        if converts_from is None:
            self._counters.num_copied_tokens += load.num_tokens
            live.num_copied_tokens += load.num_tokens
        else:
            self._counters.num_converted_tokens += load.num_tokens
            live.num_converted_tokens += load.num_tokens
        num_cached = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._counters.num_cached_tokens += max(0, num_cached - (live.num_cached_tokens or 0))
        live.num_cached_tokens = max(num_cached, live.num_cached_tokens or 0)
        sequence.spans.loaded(
            sequence,
            end,
            source=load.now.source,
            precision=None if converts_from is None else converts_from.kv_precision,
            num_tokens=load.num_tokens,
            start_unix_ns=load.started_unix_ns,
        )
        self._start(load)


def _num_loadable(sequence: Sequence) -> int:
    """Full blocks before the one with the last token: at least one token is always computed."""
    return max(0, sequence.horizon - 1) // sequence.block_tokens


class _Load:
    """One load of one run, from one pool after the other."""

    __slots__ = ("cancel", "converts_from", "now", "num_tokens", "sequence", "sequence_id", "started_unix_ns", "wanted")

    def __init__(self, sequence: Sequence, sequence_id: SequenceId, wanted: list[Wanted]) -> None:
        self.sequence = sequence
        self.sequence_id = sequence_id
        #: Pools that are still to be asked; and the one that is.
        self.wanted = wanted
        self.now = wanted[0]
        #: The geometry of what is asked for now; None: as it is wanted.
        self.converts_from: KVGeometry | None = None
        self.num_tokens = 0
        self.started_unix_ns = time.time_ns()
        self.cancel: Callable[[], None] = lambda: None

    @property
    def is_current(self) -> bool:
        """Whether the run that wanted it still waits for it."""
        sequence = self.sequence
        return sequence.sequence_id == self.sequence_id and sequence.phase is Phase.RUNNING and sequence.is_load_pending
