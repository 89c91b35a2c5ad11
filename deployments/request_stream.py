"""One request as its client sees it: a single stream of deltas, whatever happens to the replicas behind it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from remora.cache_actors.port import KVSource
from remora.deployments.engine.messages import GenerationRequest, Handover, TokenDelta
from remora.deployments.token_log import TokenLog
from remora.namespaces.edits import ContextOutcome
from remora.namespaces.hashing import chain_hashes
from remora.platform.base import telemetry_names as names
from remora.platform.base.errors import OverQuota, RemoraError, RequestError, named_error
from remora.platform.base.ids import BlockHash, Epoch, ReplicaId, RequestId

if TYPE_CHECKING:
    from remora.deployments.standbys import Standby

MAX_EXPECTED_OUTPUT_TOKENS = 256


def error_of(delta: TokenDelta) -> RemoraError:
    """The error that a delta with finish_reason "error" carries, as the class that raised it."""
    message = delta.error_message or "generation failed"
    error = named_error(delta.error or "", message, retry_after_s=delta.retry_after_s or 1.0)
    if isinstance(error, RequestError) and not isinstance(error, OverQuota):
        # By convention the sentence starts with the field's name.
        field = re.match(r"([a-z_][a-z0-9_.]*): ", message)
        error.field = field and field[1]
    return error


class RequestStream:
    """Deltas of all choices, each token once and in order. Owned by the router's event loop.

    Every attempt has a request id of its own (`id`, `id~1`, ...), so that nothing a replica still says of an earlier
    attempt can be mistaken for the current one.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        started_s: float,
        on_close: Callable[[RequestStream], None],
    ) -> None:
        self.request = request
        self.log = TokenLog(request.num_choices)
        self.started_s = started_s
        #: The replica that runs the current attempt; None while the request waits for one.
        self.replica_id: ReplicaId | None = None
        #: The one that had the attempt before, and where blocks of it may be found if that is another pool.
        self.last_replica_id: ReplicaId | None = None
        self.kv_source: KVSource | None = None
        #: Where they are to be looked for in any case.
        self.given_source: KVSource | None = None
        #: Root of its chain of blocks and tokens in one; None when its context is edited.
        self.chain_start: tuple[BlockHash, int] | None = None
        self.attempt = 0
        self._last_attempt = 0
        #: Under which pools know the current attempt: one that was taken over has that of the attempt it stood by,
        #: which its own would have ended.
        self.pool_epoch = request.epoch
        #: The next attempt, while it is made ready at another replica.
        self.standby: Standby | None = None
        #: An attempt that was handed over: where it still holds its blocks, and its id.
        self.handed_over: tuple[ReplicaId, RequestId] | None = None
        #: Whether somebody moves it now.
        self.is_moving = False
        #: Attempts that ended because their replica was lost.
        self.num_lost = 0
        self.num_cached_tokens: int | None = None
        #: Of all attempts: tokens that came from other pools.
        self.num_copied_tokens = 0
        #: The same for tokens that were converted from another precision.
        self.num_converted_tokens = 0
        #: Known at the end, if the context was edited.
        self.context: ContextOutcome | None = None
        #: Where the next attempt should run: the session's last replica if it is not loaded too much; this one if it
        #: is there at all.
        self.owner: ReplicaId | None = None
        self.target: ReplicaId | None = None
        #: While it is moved: from where, since when, and the pause once the first delta of the new attempt is here.
        self.origin: ReplicaId | None = None
        self._taken_off_s: float | None = None
        self._landing: asyncio.Future[float] | None = None
        self._freezing: asyncio.Future[Handover | None] | None = None
        self._on_close = on_close
        self._pending: list[TokenDelta] = []
        self._error: RemoraError | None = None
        self._closed = False
        self._wake = asyncio.Event()

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def attempt_id(self) -> RequestId:
        """The id under which replicas know the current attempt."""
        return self.id_of(self.attempt)

    def id_of(self, attempt: int) -> RequestId:
        return RequestId(f"{self.request_id}~{attempt}") if attempt else self.request_id

    def claim_attempt(self) -> int:
        """A number that no attempt has had."""
        self._last_attempt += 1
        return self._last_attempt

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def is_bound(self) -> bool:
        """Whether it ends with its replica: it has begun, and its tokens are only there."""
        return not self.request.wants_token_ids and not self.log.empty

    def leading_hashes(self, count: int) -> Sequence[BlockHash]:
        """Of its first blocks: the prompt's, and where these are fewer than `count`, those of what was generated."""
        hashes = self.request.block_hashes
        if len(hashes) >= count or self.log.empty or self.chain_start is None or self.is_bound:
            return hashes
        root, block_tokens = self.chain_start
        tokens = (*self.request.prompt_token_ids, *self.log.token_ids()[0])
        return chain_hashes(root, tokens[: count * block_tokens], block_tokens)

    @property
    def load_tokens(self) -> int:
        """What the request counts for in placement: constant, so that charging and discharging agree.

        Many clients leave max_tokens at the whole context and stop far earlier, so outputs count up to a bound.
        """
        request = self.request
        expected = min(request.sampling.max_tokens, MAX_EXPECTED_OUTPUT_TOKENS)
        return len(request.prompt_token_ids) + request.num_choices * expected

    def attempt_attributes(self) -> dict[str, str | int]:
        """Of spans that are the current attempt's."""
        request = self.request
        attributes: dict[str, str | int] = {
            names.REMORA_REQUEST_ID: self.attempt_id,
            names.REMORA_NAMESPACE: request.namespace_id,
            names.REMORA_ROUTE_ATTEMPT: self.attempt,
        }
        if request.session_id is not None:
            attributes[names.REMORA_SESSION_ID] = request.session_id
        return attributes

    @property
    def epoch(self) -> Epoch:
        """Of the current attempt."""
        return Epoch(self.request.epoch + self.attempt)

    def attempt_request(self, queue_timeout_s: float, standby: int | None = None) -> GenerationRequest:
        """The request to send for the current attempt, or for a standby of that number: it goes on behind what the
        client has."""
        attempt = self.attempt if standby is None else standby
        resumed = {} if self.log.empty else {"output_token_ids": self.log.token_ids()}
        return msgspec.structs.replace(
            self.request,
            request_id=self.id_of(attempt),
            epoch=Epoch(self.request.epoch + attempt),
            standby_of=None if standby is None else self.pool_epoch,
            queue_timeout_s=queue_timeout_s,
            kv_source=self.kv_source,
            **resumed,
        )

    # ---- moving ----------------------------------------------------------------------------------------------------

    @property
    def is_landing(self) -> bool:
        """Whether it was moved and nothing has come of the new attempt yet."""
        return self._landing is not None

    @property
    def moved_s(self) -> float | None:
        """When it was last moved, by the event loop's clock."""
        return self._taken_off_s

    def take_off(self, origin: ReplicaId | None) -> asyncio.Future[float]:
        """The current attempt is over, the next is to begin elsewhere. The future will hold the pause in seconds."""
        loop = asyncio.get_running_loop()
        self.origin = origin
        self._taken_off_s, self._landing = loop.time(), loop.create_future()
        return self._landing

    def freeze(self) -> asyncio.Future[Handover | None]:
        """The current attempt is to stop. The future will hold what it hands over; None: the attempt is over."""
        self._freezing = asyncio.get_running_loop().create_future()
        return self._freezing

    def frozen(self, handover: Handover | None) -> None:
        """The current attempt stands still, or is over."""
        freezing, self._freezing = self._freezing, None
        if freezing is not None and not freezing.done():
            freezing.set_result(handover)

    def land(self) -> None:
        """A delta is here: after a move the first of the new attempt. One of the step in which the old attempt stops is
        none."""
        if self._freezing is not None:
            return
        landing, self._landing = self._landing, None
        if landing is not None and self._taken_off_s is not None and not landing.done():
            landing.set_result(landing.get_loop().time() - self._taken_off_s)

    def crash_land(self) -> None:
        """The request ended before anything came of the new attempt."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.cancel()

    # ---- deltas ----------------------------------------------------------------------------------------------------

    def push(self, delta: TokenDelta) -> None:
        """Takes a delta that `log.judge` called "forward"."""
        self.log.append(delta)
        if delta.num_cached_tokens is not None and self.num_cached_tokens is None:
            # What a resumed attempt finds cached includes the output; the first answer is the client's.
            self.num_cached_tokens = min(delta.num_cached_tokens, len(self.request.prompt_token_ids))
        self.num_copied_tokens += delta.num_copied_tokens
        self.num_converted_tokens += delta.num_converted_tokens
        self.context = delta.context or self.context
        self._pending.append(delta)
        self._wake.set()

    def fail(self, error: RemoraError) -> None:
        """Ends the stream; deltas received before still reach the client."""
        if self._error is None:
            self._error = error
            self._wake.set()

    async def next_deltas(self) -> list[TokenDelta]:
        """Everything received since the last call, at least one delta; empty when all choices have ended.

        Raises the RemoraError that ended the stream. A delta is never lost when the wait is cancelled.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.log.finished:
                return []
            self._wake.clear()
            await self._wake.wait()
        deltas, self._pending = self._pending, []
        return deltas

    def close(self) -> None:
        """The client is gone or has everything: stops generation if it still runs. May be called twice."""
        if not self._closed:
            self._closed = True
            self._on_close(self)
