"""Blocks that come from another pool instead of being computed.

    admitted ─► loading: a thread beside the engine holds, copies, verifies ─► pieces in its inbox ─► it goes on
                         (the run has its blocks; nothing of it is computed)

Only the engine's thread writes to the arena, and only for a run that still has its blocks: a piece that comes late
finds nobody, and changes nothing. Blocks are full and bear the log's own hashes: they are published like computed ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from remora.cache_actors.port import BlockLoader, LoadedBlocks, LoadEnd, LoadOrder
from remora.deployments.engine.engine_stats import EngineCounters
from remora.deployments.engine.sequence import Phase, Sequence
from remora.platform.base.ids import SequenceId

_log = logging.getLogger(__name__)


class KVLoads:
    """Engine thread only."""

    def __init__(
        self,
        loader: BlockLoader | None,
        counters: EngineCounters,
        *,
        post: Callable[[Callable[[], None]], None],
        on_loaded: Callable[[Sequence], None],
    ) -> None:
        """`post` runs a function in the engine's thread; `on_loaded` hears that a run's load has ended, well or not."""
        self._loader = loader
        self._counters = counters
        self._post = post
        self._on_loaded = on_loaded

    def wants(self, sequence: Sequence, num_cached_blocks: int) -> bool:
        """Whether another pool may have what this one lacks; asked once a request."""
        live = sequence.live
        if self._loader is None or live.request.kv_source is None or live.has_asked_source:
            return False
        return num_cached_blocks < self._num_loadable(sequence)

    def begin(self, sequence: Sequence) -> None:
        """Fills the blocks of a run that has just begun, behind those it found."""
        source, sequence_id = sequence.live.request.kv_source, sequence.sequence_id
        assert self._loader is not None
        assert source is not None
        assert sequence_id is not None
        sequence.live.has_asked_source = True
        sequence.is_load_pending = True
        load = _Load(sequence, sequence_id)
        load.cancel = self._loader.start(
            LoadOrder(
                source=source,
                namespace_id=sequence.namespace_id,
                fingerprint=sequence.live.namespace.fingerprint,
                hashes=tuple(sequence.extend_hashes(self._num_loadable(sequence))),
                first=sequence.num_computed_tokens // sequence.block_tokens,
                block_bytes=sequence.memory.geometry.block_bytes,
            ),
            lambda loaded: self._post(lambda: self._take(load, loaded)),
            lambda end: self._post(lambda: self._end(load, end)),
        )

    @staticmethod
    def _num_loadable(sequence: Sequence) -> int:
        """Full blocks before the one with the last token: at least one token is always computed."""
        return max(0, sequence.horizon - 1) // sequence.block_tokens

    def _take(self, load: _Load, loaded: LoadedBlocks) -> None:
        sequence, memory = load.sequence, load.sequence.memory
        size = memory.geometry.block_bytes
        try:
            if not load.is_current:
                load.cancel()
                return
            if loaded.first * sequence.block_tokens != sequence.num_computed_tokens:
                _log.error("%s: loaded blocks do not follow what it has", load.sequence_id)
                load.cancel()
                return
            for position, row in enumerate(loaded.data_NB, loaded.first):
                block = int(sequence.blocks[position])
                memory.data[block * size : (block + 1) * size] = row
            sequence.num_computed_tokens += len(loaded.data_NB) * sequence.block_tokens
            load.num_tokens += len(loaded.data_NB) * sequence.block_tokens
        finally:
            loaded.give_back()

    def _end(self, load: _Load, end: LoadEnd) -> None:
        self._counters.num_damaged_blocks += end.num_damaged
        if not load.is_current:
            return
        sequence, live = load.sequence, load.sequence.live
        sequence.is_load_pending = False
        self._counters.num_copied_tokens += load.num_tokens
        live.num_copied_tokens += load.num_tokens
        num_cached = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._counters.num_cached_tokens += max(0, num_cached - (live.num_cached_tokens or 0))
        live.num_cached_tokens = max(num_cached, live.num_cached_tokens or 0)
        sequence.spans.loaded(sequence, end, num_tokens=load.num_tokens, start_unix_ns=load.started_unix_ns)
        self._on_loaded(sequence)


class _Load:
    """One load of one run."""

    __slots__ = ("cancel", "num_tokens", "sequence", "sequence_id", "started_unix_ns")

    def __init__(self, sequence: Sequence, sequence_id: SequenceId) -> None:
        self.sequence = sequence
        self.sequence_id = sequence_id
        self.num_tokens = 0
        self.started_unix_ns = time.time_ns()
        self.cancel: Callable[[], None] = lambda: None

    @property
    def is_current(self) -> bool:
        """Whether the run that wanted it still waits for it."""
        sequence = self.sequence
        return sequence.sequence_id == self.sequence_id and sequence.phase is Phase.RUNNING and sequence.is_load_pending
