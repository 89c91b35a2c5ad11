"""The spans of one choice: waiting for memory, computing the prompt, generating."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from remora.platform.base import telemetry_names as names
from remora.platform.base.telemetry import start_span

if TYPE_CHECKING:
    from remora.deployments.engine.sequence import Sequence


class SequenceSpans:
    """Notes when the parts of a choice begin, and writes each span when its part is over."""

    __slots__ = (
        "_admit_unix_ns",
        "_first_token_unix_ns",
        "_num_decode_steps",
        "_num_prefill_steps",
        "_prefill_unix_ns",
    )

    def __init__(self) -> None:
        self._admit_unix_ns = 0
        self._prefill_unix_ns = 0
        self._first_token_unix_ns = 0
        self._num_prefill_steps = 0
        self._num_decode_steps = 0

    def asked(self) -> None:
        """The pool was asked for memory."""
        self._admit_unix_ns = time.time_ns()

    def answered(
        self,
        sequence: Sequence,
        answer: str,
        *,
        num_cached_tokens: int = 0,
        evicted_blocks: Iterable[tuple[str, int]] = (),
        borrowed_bytes: int = 0,
    ) -> None:
        """The pool gave memory or refused it for good: `answer` is "admitted" or "over_quota".

        `evicted_blocks`: how many went to make room, by cause; `borrowed_bytes`: what the namespace holds above its
        guarantee.
        """
        now_ns = time.time_ns()
        self._prefill_unix_ns = now_ns
        attributes: dict[str, str | int | float | list[str]] = {
            names.REMORA_ADMIT_ANSWER: answer,
            names.REMORA_ADMIT_CACHED_TOKENS: num_cached_tokens,
            names.REMORA_ADMIT_BLOCKS: sequence.num_blocks,
            names.REMORA_WAIT_S: (now_ns - sequence.live.submitted_unix_ns) * 1e-9,
        }
        if evicted := dict(evicted_blocks):
            attributes[names.REMORA_EVICT_CAUSE] = list(evicted)
            attributes[names.REMORA_EVICT_BLOCKS] = sum(evicted.values())
        if borrowed_bytes:
            attributes[names.REMORA_BORROWED_BYTES] = borrowed_bytes
        self._write(sequence, names.POOL_ADMIT, self._admit_unix_ns, attributes)

    def preempted(self, sequence: Sequence, reason: str) -> None:
        """The pool took the memory back; the sequence queues again."""
        self._write(sequence, names.QUOTA_REVOKE, time.time_ns(), {names.REMORA_REVOKE_REASON: reason})

    def stepped(self) -> None:
        """A step computed a part of the sequence."""
        if self._first_token_unix_ns:
            self._num_decode_steps += 1
        else:
            self._num_prefill_steps += 1

    def first_token(self, sequence: Sequence) -> None:
        self._first_token_unix_ns = time.time_ns()
        self._write(
            sequence,
            names.ENGINE_PREFILL,
            self._prefill_unix_ns,
            {
                names.GEN_AI_USAGE_INPUT_TOKENS: sequence.num_prompt_tokens,
                names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: sequence.live.num_cached_tokens or 0,
                names.REMORA_PREFILL_STEPS: self._num_prefill_steps,
            },
        )

    def finished(self, sequence: Sequence, finish_reason: str) -> None:
        if not self._first_token_unix_ns:
            return
        self._write(
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

    def _write(
        self, sequence: Sequence, name: str, start_unix_ns: int, attributes: dict[str, str | int | float | list[str]]
    ) -> None:
        request = sequence.live.request
        attributes[names.REMORA_REQUEST_ID] = request.request_id
        attributes[names.REMORA_NAMESPACE] = sequence.namespace_id
        if request.session_id is not None:
            attributes[names.REMORA_SESSION_ID] = request.session_id
        attributes[names.REMORA_CHOICE_INDEX] = sequence.choice_index
        start_span(name, attributes, parent=request.trace_context, start_time_ns=start_unix_ns).end()
