"""Requests that go from one replica to another between two steps, with the KV that no pool knows of yet.

    source   freeze: nothing more is computed; what its last blocks hold is named, with checksums
    target   standby: everything but the last token is computed ─► ready ─► resume: tokens and tail blocks ─► it goes on

The target copies the blocks behind what it has, the unsealed one among them, into blocks of its own, after it has
compared the chain hash of all tokens and the checksum of each block. What it cannot use it computes. The source keeps
its blocks until it is told that the request has ended there, as for any other.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from remora.deployments.engine.messages import FreezeOrder, Handover, Resumption, TailBlock
from remora.deployments.engine.output import token_delta
from remora.deployments.engine.sequence import Phase, Sequence
from remora.platform.base.errors import ArenaError, Unavailable

if TYPE_CHECKING:
    from remora.cache_actors.port import TailBlocks
    from remora.deployments.engine.request_book import RequestBook
    from remora.deployments.engine.scheduler import Scheduler

_log = logging.getLogger(__name__)

#: More blocks than that are not new when a standby is ready; each costs a checksum while the request stands still.
MAX_TAIL_BLOCKS: Final = 4


class Handovers:
    """Engine thread only."""

    def __init__(self, book: RequestBook, scheduler: Scheduler, tails: TailBlocks | None) -> None:
        """`tails`: None where arenas cannot be read by others; then what is not sealed is computed again."""
        self._book = book
        self._scheduler = scheduler
        self._tails = tails

    def freeze(self, order: FreezeOrder) -> None:
        """Stops a request for good. Unknown ones are ignored: the deltas that ended them are on their way."""
        live = self._book.live.get(order.request_id)
        if live is None or len(live.sequences) != 1:
            return
        (sequence,) = live.sequences
        sequence.is_frozen = True
        delta = token_delta(sequence, (), "", handover=self._handover(sequence, order.num_tokens))
        self._book.outbox.add(live.request.router_id, delta)

    def _handover(self, sequence: Sequence, num_known: int) -> Handover:
        num_tokens, size = sequence.num_computed_tokens, sequence.block_tokens
        first = num_known // size
        blocks: tuple[TailBlock, ...] = ()
        if self._tails is not None and not sequence.is_load_pending:
            block_bytes = sequence.memory.geometry.block_bytes
            blocks = tuple(
                TailBlock(block=block, checksum=self._tails.checksum(block, block_bytes))
                for block in sequence.blocks[first : -(-num_tokens // size)][:MAX_TAIL_BLOCKS].tolist()
            )
        return Handover(
            num_tokens=num_tokens,
            tokens_hash=sequence.hash_of(num_tokens),
            fingerprint=sequence.live.namespace.fingerprint,
            node_id=self._tails.node_id if self._tails is not None else "",
            arena_path=self._tails.arena_path if self._tails is not None else "",
            first=first,
            blocks=blocks,
        )

    def announce(self) -> None:
        """Says of standbys that they are ready, once each."""
        for sequence in self._scheduler.running:
            if sequence.is_ready and not sequence.has_announced:
                sequence.has_announced = True
                if self._tails is not None:
                    self._tails.prepare(sequence.live.request.kv_source)
                delta = token_delta(sequence, (), "", is_ready=True)
                self._book.outbox.add(sequence.live.request.router_id, delta)

    def resume(self, resumption: Resumption) -> None:
        """Lets a standby go on behind the tokens that were generated meanwhile."""
        live = self._book.live.get(resumption.request_id)
        if live is None or not live.sequences[0].is_standby:
            return
        (sequence,) = live.sequences
        is_running = sequence.phase is Phase.RUNNING
        if not is_running:
            # It was preempted, and waits under its old number of tokens.
            self._book.hold(sequence)
        sequence.is_standby = False
        if not self._book.go_behind(sequence, resumption.token_ids):
            return
        if is_running:
            self._take(sequence, resumption.handover)
        else:
            self._scheduler.enqueue(sequence)

    def _take(self, sequence: Sequence, handover: Handover) -> None:
        """Copies what the tail blocks have beyond the sequence's own."""
        if self._tails is None or not handover.blocks or not self._fits(sequence, handover):
            return
        size, live, mover = sequence.block_tokens, sequence.live, self._book.mover(sequence)
        block_bytes = sequence.memory.geometry.block_bytes
        before, num_sound = sequence.num_computed_tokens, 0
        blocks = [(each.block, each.checksum) for each in handover.blocks]
        try:
            source = live.request.kv_source
            found = self._tails.read(handover.node_id, handover.arena_path, blocks, block_bytes, source)
            for position, bytes_B in enumerate(found, handover.first):
                num_sound += 1
                end = min((position + 1) * size, handover.num_tokens)
                if end <= sequence.num_computed_tokens:
                    continue
                if position * size > sequence.num_computed_tokens or position >= sequence.num_blocks:
                    break
                # A block that is not full is nobody else's.
                mover.write_block(int(sequence.blocks[position]), bytes_B)
                sequence.num_computed_tokens = end
            else:
                if num_sound < len(blocks) and handover.node_id == self._tails.node_id:
                    self._book.counters.num_damaged_blocks += 1
                    _log.warning("%s: a block of the tail has another checksum; it is computed", sequence.sequence_id)
        except (ArenaError, Unavailable) as error:
            _log.warning("%s: the tail is computed: %s", sequence.sequence_id, error)
        num_tokens = sequence.num_computed_tokens - before
        live.num_copied_tokens += num_tokens
        self._book.counters.num_copied_tokens += num_tokens

    @staticmethod
    def _fits(sequence: Sequence, handover: Handover) -> bool:
        return (
            handover.num_tokens < sequence.num_tokens
            and handover.fingerprint == sequence.live.namespace.fingerprint
            and handover.tokens_hash == sequence.hash_of(handover.num_tokens)
        )
