"""How long a request's context may be, and what of a session's tokens leaves it before or while it is computed."""

from __future__ import annotations

from remora.deployments.model_card import ModelCard
from remora.namespaces.edits import ContextPlan
from remora.namespaces.pending_removals import removals_of
from remora.namespaces.session_log import SessionState, unpack_tokens
from remora.platform.base.errors import ContextLengthExceeded, InvalidRequest

#: A session whose cache_limit holds less is of no use.
_MIN_LIMIT_TOKENS = 32
#: Tokens that one turn may generate in a context that rolls: something must end it.
_MAX_ROLLING_OUTPUT_TOKENS = 1_000_000


class SessionContext:
    """Of one turn; for a request without a session, the model's context."""

    def __init__(self, card: ModelCard, state: SessionState | None) -> None:
        """Raises InvalidRequest for a session whose cache_limit holds hardly a token."""
        self.limit_tokens = card.max_model_len
        self.rolls = False
        self.plan: ContextPlan | None = None
        self._num_visible = 0
        self._computed: tuple[int, ...] | None = None
        #: Tokens that the engine is given of the session's log.
        self.num_kept_tokens = 0
        if state is None:
            return
        self.num_kept_tokens = state.num_tokens
        policy = state.context
        if policy.cache_limit_bytes is not None:
            held = policy.cache_limit_bytes // card.of(state.namespace_id).block_bytes * card.block_tokens
            if held < _MIN_LIMIT_TOKENS:
                raise InvalidRequest(
                    f"session_id: the session's cache_limit of {policy.cache_limit_bytes} bytes holds {held} tokens of "
                    f"{card.model_id}; at least {_MIN_LIMIT_TOKENS} are needed.",
                    field="session_id",
                )
            self.limit_tokens = min(self.limit_tokens, held)
        self.rolls = policy.overflow == "roll"
        if not (self.rolls or state.edits or state.pending or self.limit_tokens < card.max_model_len):
            return
        self._num_visible = state.num_tokens
        self._computed = unpack_tokens(state.computed_bytes)
        self.num_kept_tokens = len(self._computed)
        self.plan = ContextPlan(
            limit_tokens=self.limit_tokens,
            keep_tokens=policy.keep_tokens if self.rolls else None,
            edits=state.edits,
            removals=removals_of(state.pending, len(self._computed)),
        )

    def check(self, num_prompt_tokens: int, num_output_tokens: int, *, field: str) -> None:
        """Raises ContextLengthExceeded when prompt and output do not fit and nothing may leave; InvalidRequest for an
        output that is long beyond reason."""
        needed = num_prompt_tokens + num_output_tokens
        if not self.rolls and needed > self.limit_tokens:
            raise ContextLengthExceeded(needed, self.limit_tokens, field=field)
        if self.rolls and num_output_tokens > _MAX_ROLLING_OUTPUT_TOKENS:
            message = f"max_tokens: {num_output_tokens} is not allowed; at most {_MAX_ROLLING_OUTPUT_TOKENS} a turn"
            raise InvalidRequest(message, field="max_tokens")

    def output_limit(self, num_prompt_tokens: int, max_tokens: int | None, default_max_tokens: int | None) -> int:
        """Tokens that may be generated. A context that rolls has room without end: half of it, if nothing is said."""
        room = self.limit_tokens - num_prompt_tokens
        if self.rolls:
            room = max(room, self.limit_tokens // 2)
        return max_tokens or min(room, default_max_tokens or room)

    def engine_tokens(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """What the engine is given for log and addition: with what it still has to take out of the log."""
        return prompt if self._computed is None else self._computed + prompt[self._num_visible :]
