"""One choice of a request on its way through the engine: tokens, block table, and where it stands.

    HELD ─► WAITING ─► ADMITTING ─► RUNNING ─► FINISHED          (FINISHED from everywhere)
                 ▲         │  ▲ │      │
                 │         ▼  │ ▼      │
                 │         PARKED      │
                 └──── preempted ◄─────┘

Each way from WAITING to RUNNING is a run with a sequence id of its own: what the pool says about an earlier run can
never be mistaken for this one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from remora.deployments.engine.block_names import BlockNames
from remora.deployments.engine.context_window import ContextWindow
from remora.deployments.engine.grammar import GrammarMatcher
from remora.deployments.engine.logits import LogitShaper
from remora.deployments.engine.messages import FinishReason
from remora.deployments.engine.output import OutputText, Step
from remora.deployments.engine.sampler import SampleRow
from remora.deployments.engine.spans import SequenceSpans
from remora.kernels.base import KVMemory
from remora.namespaces.commands import Admitted, Seal
from remora.namespaces.edits import Removal, chain_edits
from remora.namespaces.hashing import chain_hashes, edited_parent, next_hash
from remora.namespaces.kept_chains import KeptChain
from remora.platform.base.errors import IntegrityError, InvalidRequest
from remora.platform.base.ids import BlockHash, SequenceId

if TYPE_CHECKING:
    from remora.deployments.engine.live_request import LiveRequest

Int32 = NDArray[np.int32]


class Phase(enum.Enum):
    #: Waits for its grammar, or for the first choice's prompt.
    HELD = "held"
    #: In the queue.
    WAITING = "waiting"
    #: The pool was asked and has not answered.
    ADMITTING = "admitting"
    #: The pool answered Wait.
    PARKED = "parked"
    #: Holds blocks.
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """State of one choice. Only the engine's thread touches it."""

    def __init__(
        self,
        live: LiveRequest,
        choice_index: int,
        *,
        output: OutputText,
        eos_token_ids: tuple[int, ...],
        seed: int,
        max_tokens: int,
        block_tokens: int,
        window: ContextWindow,
    ) -> None:
        request = live.request
        self.live = live
        #: Where its KV lies, in every run.
        self.memory: KVMemory = live.memory
        self.choice_index = choice_index
        self.priority = request.priority
        self.namespace_id = request.namespace_id
        self.phase = Phase.HELD
        self.grammar: GrammarMatcher | None = None

        num_prompt = len(request.prompt_token_ids)
        self.block_tokens = block_tokens
        self.max_tokens = max_tokens
        self.window = window
        self.num_prompt_tokens = num_prompt
        #: The token log: prompt, then output, without what has left the context. Beyond num_tokens it is unused.
        self.token_ids: Int32 = np.empty(num_prompt + max_tokens, np.int32)
        self.token_ids[:num_prompt] = request.prompt_token_ids
        self.num_tokens = num_prompt
        self.last_token_id = request.prompt_token_ids[-1]
        #: Plain chain hashes of the log's first full blocks; more are appended when they are needed.
        self.hashes: list[BlockHash] = []
        given = request.block_hashes
        if len(given) == self.horizon // block_tokens and self.extend_hashes(len(given[:1])) == list(given[:1]):
            # Else the router does not know yet in which precision the namespace is now: its root is another.
            self.hashes.extend(given[1:])

        # ---- this run
        self.sequence_id: SequenceId | None = None
        #: Most blocks it can come to need.
        # One more than the limit: the last token of a turn is not computed in it, and a removal may wait behind it.
        self.max_blocks = -(-min(num_prompt + max_tokens, window.limit_tokens + 1) // block_tokens)
        self.blocks: Int32 = np.zeros(self.max_blocks, np.int32)
        self.num_blocks = 0
        #: Tokens whose KV lies in the blocks.
        self.num_computed_tokens = 0
        #: Tokens behind those that steps under way compute: only a pipeline has such steps between two looks at it.
        self.num_flying_tokens = 0
        self.num_published_blocks = 0
        self.block_names = BlockNames()
        self.is_extend_pending = False
        #: The pool was asked to take tokens out of its blocks.
        self.is_edit_pending = False
        #: Blocks are on their way from another pool: nothing is computed before their end.
        self.is_load_pending = False
        #: Stops before the last token of its log: another replica still says what comes behind it.
        self.is_standby = request.standby_of is not None
        self.has_announced = False
        #: Nothing more is computed: it is handed over to another replica.
        self.is_frozen = False
        #: Changes when blocks leave the table within a run.
        self.table_no = 0
        #: Not before this time is the pool asked for more, after it refused.
        self.extend_after_s = 0.0
        #: Grows over all sequences' turns: the smallest has waited longest.
        self.last_turn_no = 0

        # ---- output
        self.output = output
        shaper = LogitShaper(request.sampling, self.token_ids[:num_prompt])
        self.sample_row = SampleRow(
            params=request.sampling, shaper=shaper, seed=seed, choice_index=choice_index, position=num_prompt
        )
        self._eos_token_ids = eos_token_ids
        #: Tokens that the client has, or will have at the end of the step.
        self.num_sent_tokens = 0
        self.has_sent = False
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        self.last_token_s: float | None = None
        self.spans = SequenceSpans()

        self.update_bans()

        # ---- waiting
        #: How often a request behind it in its namespace was taken before it.
        self.num_passed_over = 0
        self.arrival_no = 0

    # ---- the token log

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens + self.window.num_removed_tokens - self.num_prompt_tokens

    @property
    def computes_output(self) -> bool:
        """Whether what is computed next was generated."""
        return self.num_computed_tokens + self.window.num_removed_tokens >= self.num_prompt_tokens

    @property
    def horizon(self) -> int:
        """Tokens at the beginning of the log that can be computed before some leave the context."""
        return min(self.num_tokens, self.window.next_at)

    @property
    def num_computable_tokens(self) -> int:
        """Tokens that can be computed now, room aside."""
        if self.is_edit_pending or self.is_load_pending or self.is_frozen:
            return 0
        return self.horizon - self.num_begun_tokens - self.is_standby

    @property
    def is_ready(self) -> bool:
        """Whether a standby has computed what it may."""
        return self.is_standby and self.num_pending_tokens == 1 and not self.is_load_pending

    @property
    def due_removal(self) -> Removal | None:
        """What must leave the context before anything more is computed."""
        if self.window.next_at != self.num_computed_tokens or not self.num_pending_tokens:
            return None
        if self.is_edit_pending or self.is_load_pending:
            return None
        return self.window.next_removal

    @property
    def num_begun_tokens(self) -> int:
        """Tokens that are computed, or will be by steps under way."""
        return self.num_computed_tokens + self.num_flying_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens of the log that no step has begun to compute; 1 means that it decodes."""
        return self.num_tokens - self.num_begun_tokens

    def append(self, token_id: int) -> None:
        """Adds an output token to the log."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        self.last_token_id = token_id
        self.sample_row.position = self.num_tokens + self.window.num_removed_tokens
        if not self.sample_row.shaper.is_neutral:
            self.sample_row.shaper.push(token_id)
        self.update_bans()

    def update_bans(self) -> None:
        """Bans the tokens that would end the output too early; for a grammar `ignore_eos` lasts until its end."""
        params = self.sample_row.params
        if self.num_output_tokens < params.min_tokens:
            eos_token_ids = () if params.ignore_eos and self.grammar is None else self._eos_token_ids
            self.sample_row.banned_token_ids = eos_token_ids + params.stop_token_ids
        elif params.ignore_eos and self.grammar is not None:
            self.sample_row.banned_token_ids = self._eos_token_ids
        elif self.sample_row.banned_token_ids:
            self.sample_row.banned_token_ids = ()

    def accept(self, token_id: int) -> Step:
        """Appends an output token and moves text, stop state and grammar on. Raises GrammarFault."""
        self.append(token_id)
        step = self.output.push(token_id)
        if self.grammar is not None and step.finish_reason != "stop":
            self.grammar.accept(token_id)
            if self.grammar.is_complete:
                return Step(step.text + self.output.close(), "stop")
        return step

    def replay(self, token_ids: Items[int]) -> Step | None:
        """Goes behind tokens that the client has already; returns the end if they reach it.

        Raises InvalidRequest if they go on behind an end.
        """
        self.num_sent_tokens += len(token_ids)
        ended: Step | None = None
        for token_id in token_ids:
            if ended is not None:
                raise InvalidRequest("output_token_ids: they go on behind an end", field="output_token_ids")
            step = self.accept(token_id)
            ended = step if step.finish_reason is not None else None
        return ended

    def extend_hashes(self, num_blocks: int) -> list[BlockHash]:
        """The plain chain hashes of the log's first `num_blocks` blocks, which must be full."""
        size = self.block_tokens
        while len(self.hashes) < num_blocks:
            start = len(self.hashes) * size
            parent = self.hashes[-1] if self.hashes else self.live.namespace.root
            for edit in self.window.edits:
                if start <= edit.position < start + size:
                    parent = edited_parent(parent, edit.digest)
            self.hashes.append(next_hash(parent, self.token_ids[start : start + size].tolist()))
        return self.hashes[:num_blocks]

    def kept_chains(self) -> tuple[KeptChain, ...]:
        """What the blocks that its session had are called in other precisions of the model."""
        num_blocks = min(self.live.request.num_kept_tokens, max(0, self.horizon - 1)) // self.block_tokens
        siblings = self.live.namespace.siblings if num_blocks else ()
        tokens = self.token_ids[: num_blocks * self.block_tokens].tolist() if siblings else []
        edits = chain_edits(self.window.edits)
        return tuple(
            KeptChain(
                fingerprint=each.fingerprint, hashes=tuple(chain_hashes(each.root, tokens, self.block_tokens, edits))
            )
            for each in siblings
        )

    def hash_of(self, num_tokens: int) -> BlockHash:
        """Chain hash of exactly the log's first tokens: of full blocks, and of what is behind them."""
        num_full = num_tokens // self.block_tokens
        parent = self.extend_hashes(num_full)[-1] if num_full else self.live.namespace.root
        return next_hash(parent, self.token_ids[num_full * self.block_tokens : num_tokens].tolist())

    # ---- blocks of this run

    def num_wanted_blocks(self, num_reserve_blocks: int) -> int:
        """Blocks for the log and a reserve, never more than it can come to need."""
        return min(self.max_blocks, -(-self.horizon // self.block_tokens) + num_reserve_blocks)

    @property
    def num_free_slots(self) -> int:
        """Tokens that can still be computed into the blocks it holds."""
        return self.num_blocks * self.block_tokens - self.num_begun_tokens

    def start_run(self, admitted: Admitted) -> None:
        """Takes the blocks of an admission; what they hold already needs no computing."""
        blocks, num_cached_blocks = admitted.blocks, admitted.num_cached_blocks
        self.block_names = BlockNames(admitted.kept)
        self.num_blocks = 0
        self.add_blocks(blocks)
        self.num_published_blocks = num_cached_blocks
        self.num_computed_tokens = num_cached_blocks * self.block_tokens
        if not 0 <= self.num_computed_tokens < self.num_tokens or self.num_free_slots < self.num_computable_tokens:
            raise IntegrityError(
                f"{self.sequence_id}: an admission of {len(blocks)} blocks, {num_cached_blocks} cached, does not fit "
                f"{self.num_tokens} tokens"
            )

    def add_blocks(self, blocks: tuple[int, ...]) -> None:
        end = self.num_blocks + len(blocks)
        if end > len(self.blocks):
            raise IntegrityError(f"{self.sequence_id}: {end} blocks granted, {len(self.blocks)} are the most it needs")
        self.blocks[self.num_blocks : end] = blocks
        self.num_blocks = end

    def names(self, position: int, block: int) -> bool:
        """Whether the table names the block at that position."""
        return position < self.num_blocks and self.blocks[position] == block

    def switch_block(self, position: int, block: int) -> None:
        """What lay in one block lies in another now."""
        self.blocks[position] = block
        self.table_no += 1

    def take_out(self, *, kv_kept: bool) -> int:
        """The next tokens leave the log, and the hashes of blocks that they touch are no more. Returns how many."""
        removal = self.window.next_removal
        assert removal is not None
        start, end, num_tokens = removal.start, removal.end, self.num_tokens
        self.window.remove(removal, self.token_ids[: removal.at].tolist(), kv_kept=kv_kept)
        self.token_ids[start : num_tokens - removal.num_removed] = self.token_ids[end:num_tokens].copy()
        self.num_tokens -= removal.num_removed
        self.forget_hashes(start)
        return removal.num_removed

    def forget_hashes(self, num_tokens: int) -> None:
        """Blocks that do not lie wholly within the first tokens have other hashes now."""
        del self.hashes[num_tokens // self.block_tokens :]
        self.block_names.forget(num_tokens // self.block_tokens)

    def take_edit(self, num_kept_blocks: int, blocks: tuple[int, ...]) -> int:
        """The pool has taken the next tokens out, and what is left lies in these blocks. Returns how many are gone."""
        self.is_edit_pending = False
        self.table_no += 1
        num_removed = self.take_out(kv_kept=True)
        self.num_computed_tokens -= num_removed
        self.num_published_blocks = min(self.num_published_blocks, len(self.hashes))
        self.num_blocks = num_kept_blocks
        self.add_blocks(blocks)
        return num_removed

    def end_run(self) -> None:
        """Forgets the blocks; the log stays."""
        self.sequence_id = None
        self.block_names = BlockNames()
        self.num_blocks = self.num_computed_tokens = self.num_flying_tokens = self.num_published_blocks = 0
        self.is_extend_pending = self.is_edit_pending = self.is_load_pending = False
        self.extend_after_s = 0.0

    def take_seals(self) -> list[Seal]:
        """Blocks that became full since the last call, in order."""
        num_full = self.num_computed_tokens // self.block_tokens
        if num_full <= self.num_published_blocks or self.sequence_id is None:
            return []
        first = self.num_published_blocks
        names = self.block_names.of(self.extend_hashes(num_full), first)
        seals = [
            Seal(sequence_id=self.sequence_id, position=position, block_hash=name)
            for position, name in enumerate(names, first)
        ]
        self.num_published_blocks = num_full
        return seals

    @property
    def is_prompt_published(self) -> bool:
        """Whether every full block of the prompt can be found by others."""
        return (
            self.num_computed_tokens >= self.num_prompt_tokens
            and self.num_published_blocks >= self.num_prompt_tokens // self.block_tokens
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError when counts do not agree with each other."""
        holds = self.phase is Phase.RUNNING
        for is_true, sentence in (
            (self.num_output_tokens >= 0 and self.num_tokens <= len(self.token_ids), "token log within its bounds"),
            (
                0 <= self.num_flying_tokens <= self.num_tokens - self.num_computed_tokens,
                "steps under way are in the log",
            ),
            (holds or self.num_blocks == 0, "only running sequences hold blocks"),
            (holds == (self.num_blocks > 0), "running sequences hold blocks"),
            (0 <= self.num_computed_tokens <= max(0, self.num_tokens - 1), "the last token is never computed ahead"),
            (self.num_computed_tokens <= self.num_blocks * self.block_tokens, "computed tokens lie in blocks"),
            (self.num_published_blocks * self.block_tokens <= self.num_computed_tokens, "only full blocks are sealed"),
            (len(set(self.blocks[: self.num_blocks].tolist())) == self.num_blocks, "no block twice in a table"),
            ((self.sequence_id is not None) == (self.phase in _IN_POOL), "known to the pool while it must be"),
        ):
            if not is_true:
                raise IntegrityError(
                    f"{self.live.request.request_id}/{self.choice_index} ({self.phase.value}): broken: {sentence}"
                )


_IN_POOL = frozenset({Phase.ADMITTING, Phase.PARKED, Phase.RUNNING})
