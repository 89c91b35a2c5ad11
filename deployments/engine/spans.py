"""The spans of one choice: waiting for memory, computing the prompt, generating."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from remora.cache_actors.port import KVSource, LoadEnd
from remora.deployments.pipeline.base import StageTime
from remora.deployments.pipeline.stage_counters import add_to
from remora.namespaces.commands import Admitted, Taken
from remora.namespaces.geometry import KVPrecision
from remora.platform.base import telemetry_names as names
from remora.platform.base.telemetry import Attributes, inject, start_span

if TYPE_CHECKING:
    from remora.deployments.engine.sequence import Sequence


class _Price:
    """A sum over some time."""

    __slots__ = ("amount", "first_unix_ns", "last_unix_ns")

    def __init__(self, first_unix_ns: int) -> None:
        self.amount = 0
        self.first_unix_ns = self.last_unix_ns = first_unix_ns

    def add(self, amount: int, unix_ns: int) -> None:
        self.amount += amount
        self.last_unix_ns = unix_ns


class SequenceSpans:
    """Notes when the parts of a choice begin, and writes each span when its part is over."""

    __slots__ = (
        "_admit_unix_ns",
        "_borrowed",
        "_evicted",
        "_first_token_unix_ns",
        "_num_decode_steps",
        "_num_had_tokens",
        "_num_prefill_steps",
        "_prefill_unix_ns",
        "_stages",
    )

    def __init__(self) -> None:
        self._admit_unix_ns = 0
        self._prefill_unix_ns = 0
        self._first_token_unix_ns = 0
        self._num_prefill_steps = 0
        self._num_decode_steps = 0
        #: What growing has cost so far, and since when.
        self._evicted: dict[str, _Price] = {}
        self._borrowed: _Price | None = None
        #: Computed for this request before it lost its memory, or by an earlier attempt.
        self._num_had_tokens = 0
        #: What each stage of a pipeline did since the prompt or the answer began.
        self._stages: dict[int, StageTime] = {}

    def asked(self) -> None:
        """The pool was asked for memory."""
        self._admit_unix_ns = time.time_ns()

    def admitted(self, sequence: Sequence, admitted: Admitted) -> None:
        """The pool gave memory, and the sequence has taken it."""
        num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if sequence.num_output_tokens:
            # All but the last token was computed before that one could be sampled.
            self._num_had_tokens = max(self._num_had_tokens, sequence.num_tokens - 1)
        attributes = {
            names.REMORA_ADMIT_CACHED_TOKENS: num_cached_tokens,
            names.REMORA_ADMIT_SHARED_TOKENS: admitted.num_shared_blocks * sequence.block_tokens,
            names.REMORA_ADMIT_RECOMPUTED_TOKENS: max(0, self._num_had_tokens - sequence.num_computed_tokens),
            names.REMORA_ADMIT_BLOCKS: sequence.num_blocks,
        }
        span = self._answered(sequence, "admitted", attributes)
        self.took(admitted.taken)
        self._write_prices(sequence, parent=span)

    def over_quota(self, sequence: Sequence) -> None:
        """The pool refused memory for good."""
        self._answered(sequence, "over_quota", {})

    def took(self, taken: Taken | None) -> None:
        """New blocks had a price: what was evicted for them, and what was borrowed."""
        if taken is None:
            return
        now_ns = time.time_ns()
        for cause, num_blocks in taken.evicted_blocks:
            self._evicted.setdefault(cause, _Price(now_ns)).add(num_blocks, now_ns)
        if taken.borrowed_bytes:
            self._borrowed = self._borrowed or _Price(now_ns)
            self._borrowed.add(taken.borrowed_bytes, now_ns)

    def loaded(
        self,
        sequence: Sequence,
        end: LoadEnd,
        *,
        source: KVSource,
        precision: KVPrecision | None,
        num_tokens: int,
        start_unix_ns: int,
    ) -> None:
        """Blocks came from another pool, or were converted from a precision, or did not; from here on it computes."""
        self._prefill_unix_ns = time.time_ns()
        attributes: dict[str, str | int] = {
            names.REMORA_LOAD_TOKENS: num_tokens,
            names.REMORA_LOAD_BLOCKS: end.num_blocks,
            names.REMORA_LOAD_BYTES: end.num_bytes,
            names.REMORA_LOAD_PATH: end.path or "none",
            names.REMORA_LOAD_SOURCE: source.pool_id,
        }
        if precision is not None:
            attributes[names.REMORA_LOAD_PRECISION] = "/".join(precision)
        if end.problem:
            attributes[names.REMORA_LOAD_PROBLEM] = end.problem
        self._write(sequence, names.TIER_LOAD, start_unix_ns, attributes)

    def preempted(self, sequence: Sequence, reason: str) -> None:
        """The pool takes the memory back; the sequence, which still has it, will queue again."""
        self._num_had_tokens = max(self._num_had_tokens, sequence.num_computed_tokens)
        self._write_prices(sequence)
        self._write(sequence, names.QUOTA_REVOKE, time.time_ns(), {names.REMORA_REVOKE_REASON: reason})

    def stepped(self, stage_times: Iterable[StageTime] = ()) -> None:
        """A step computed a part of the sequence; in a pipeline, with what each stage did for it."""
        add_to(self._stages, stage_times)
        if self._first_token_unix_ns:
            self._num_decode_steps += 1
        else:
            self._num_prefill_steps += 1

    def first_token(self, sequence: Sequence) -> None:
        self._first_token_unix_ns = time.time_ns()
        span = self._write(
            sequence,
            names.ENGINE_PREFILL,
            self._prefill_unix_ns,
            {
                names.GEN_AI_USAGE_INPUT_TOKENS: sequence.num_prompt_tokens,
                names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: sequence.live.num_cached_tokens or 0,
                names.REMORA_PREFILL_STEPS: self._num_prefill_steps,
            },
        )
        self._write_stages(sequence, parent=span)

    def finished(self, sequence: Sequence, finish_reason: str) -> None:
        self._write_prices(sequence)
        if not self._first_token_unix_ns:
            return
        span = self._write(
            sequence,
            names.ENGINE_DECODE,
            self._first_token_unix_ns,
            {
                names.GEN_AI_USAGE_OUTPUT_TOKENS: sequence.num_output_tokens,
                names.GEN_AI_RESPONSE_FINISH_REASONS: [finish_reason],
                names.REMORA_DECODE_STEPS: self._num_decode_steps,
                names.REMORA_PREEMPTIONS: sequence.num_preemptions,
            },
        )
        self._write_stages(sequence, parent=span)

    def _write_stages(self, sequence: Sequence, *, parent: Span) -> None:
        """One span a stage."""
        for stage, did in sorted(self._stages.items()):
            attributes: Attributes = {
                names.REMORA_STAGE_MICRO_BATCHES: did.num_micro_batches,
                names.REMORA_STAGE_COMPUTE_S: did.compute_s,
                names.REMORA_STAGE_TURN_WAIT_S: did.turn_wait_s,
                names.REMORA_STAGE_BUBBLE_S: did.bubble_s,
                names.REMORA_STAGE_HOP_S: did.hop_s,
                names.REMORA_STAGE_HOP_BYTES: did.hop_bytes,
            }
            self._write(
                sequence, names.stage_span(stage), did.start_unix_ns, attributes, did.end_unix_ns, parent=parent
            )
        self._stages = {}

    def _write_prices(self, sequence: Sequence, *, parent: Span | None = None) -> None:
        """One span a cause, from the first block that went for the sequence to the last."""
        for cause, price in self._evicted.items():
            evicted: Attributes = {names.REMORA_EVICT_CAUSE: cause, names.REMORA_EVICT_BLOCKS: price.amount}
            self._write(sequence, names.POOL_EVICT, price.first_unix_ns, evicted, price.last_unix_ns, parent=parent)
        if (more := self._borrowed) is not None:
            borrowed = {names.REMORA_BORROWED_BYTES: more.amount}
            self._write(sequence, names.QUOTA_BORROW, more.first_unix_ns, borrowed, more.last_unix_ns, parent=parent)
        self._evicted, self._borrowed = {}, None

    def _answered(self, sequence: Sequence, answer: str, attributes: Mapping[str, int]) -> Span:
        now_ns = time.time_ns()
        self._prefill_unix_ns = now_ns
        waited_s = (now_ns - sequence.live.submitted_unix_ns) * 1e-9
        return self._write(
            sequence,
            names.POOL_ADMIT,
            self._admit_unix_ns,
            {names.REMORA_ADMIT_ANSWER: answer, **attributes, names.REMORA_WAIT_S: waited_s},
        )

    def _write(
        self,
        sequence: Sequence,
        name: str,
        start_unix_ns: int,
        attributes: Attributes,
        end_unix_ns: int | None = None,
        *,
        parent: Span | None = None,
    ) -> Span:
        """A span, by default up to now, below `parent`, else directly below the request's."""
        request = sequence.live.request
        owned = {
            **attributes,
            names.REMORA_REQUEST_ID: request.request_id,
            names.REMORA_NAMESPACE: sequence.namespace_id,
            names.REMORA_CHOICE_INDEX: sequence.choice_index,
        }
        if request.session_id is not None:
            owned[names.REMORA_SESSION_ID] = request.session_id
        above = request.trace_context if parent is None else inject(parent)
        written = start_span(name, owned, parent=above, start_time_ns=start_unix_ns)
        written.end(end_unix_ns)
        return written
