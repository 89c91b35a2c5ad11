"""Which request should run elsewhere now, if any: a function of what replicas report, and of time.

    load    a replica is behind far more tokens than another:   start ── ratio × + gap ──┐   moves, one at a time
    memory  requests at a replica wait for KV, and another                               │
            pool has room for them                              stop  ◄─ smaller ratio ──┘

What a replica is behind: the tokens that its device has in work, for replicas of a device take turns, and its own that
wait. So between replicas of one device only what waits is worth a move, and between devices anything is.

Why it cannot oscillate: a state must last before anything moves; a move takes at most half of the difference that
caused it (its part of it, where several routers decide), so that the order of the two never turns; reports must have
caught up with a move before the next; and for the cool-down a request that was moved stays, and nothing goes the other
way between the same two pools (or two replicas of one).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import NamespaceId, PoolId, ReplicaId, RequestId
from remora.platform.base.rebalance_config import RebalanceConfig

MoveCause = Literal["load", "memory"]
#: Pool and namespace → tokens of KV that the namespace could still have there.
FreeTokens = Mapping[tuple[PoolId, NamespaceId], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica that takes requests."""

    replica_id: ReplicaId
    pool_id: PoolId
    #: Of sequences that run on its device, whichever model they are of.
    device_tokens: int
    #: Of its own sequences that wait for a slot or for memory.
    waiting_tokens: int
    #: Of those, for memory.
    parked_tokens: int

    @property
    def behind_tokens(self) -> int:
        """What a request that waits here waits for."""
        return self.device_tokens + self.waiting_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MovableRequest:
    """An unfinished request that the deciding router has at a replica."""

    request_id: RequestId
    replica_id: ReplicaId
    namespace_id: NamespaceId
    #: Of prompts and outputs so far.
    num_tokens: int
    #: Whether anything has come of it; what has not costs nothing to move.
    has_started: bool


class Decision(NamedTuple):
    request_id: RequestId
    target: ReplicaId
    cause: MoveCause


class Rebalance:
    """Of the replicas of one model, at one router."""

    def __init__(self, config: RebalanceConfig, *, num_routers: int = 1) -> None:
        self._config = config
        self._num_routers = num_routers
        #: Since when a replica has had a reason to give something away.
        self._since_s: dict[tuple[MoveCause, ReplicaId], float] = {}
        #: Those that have begun to give away for their load, until the smaller ratio is reached.
        self._giving: set[ReplicaId] = set()
        self._moved_s: dict[RequestId, float] = {}
        #: When something last went from one to another: pools, or replicas of one pool.
        self._went_s: dict[tuple[str, str], float] = {}
        self._settled_s = float("-inf")

    def note_moved(self, request_id: RequestId, now_s: float) -> None:
        """The request was moved, for whatever reason: it stays where it is for a while."""
        self._moved_s[request_id] = now_s

    def lacks_memory(self, replicas: Sequence[ReplicaReport]) -> bool:
        """Whether a decision depends on what pools have free."""
        return any(each.parked_tokens for each in replicas) and len({each.pool_id for each in replicas}) > 1

    def decide(
        self,
        now_s: float,
        replicas: Sequence[ReplicaReport],
        requests: Sequence[MovableRequest],
        free_tokens: FreeTokens | None = None,
    ) -> Decision | None:
        """At most one move. To be asked regularly; `now_s` never goes back."""
        self._forget(now_s, replicas)
        due = [*self._short_of_memory(now_s, replicas), *self._behind(now_s, replicas)]
        if now_s < self._settled_s:
            return None
        movable = [each for each in requests if each.request_id not in self._moved_s]
        for cause, source in due:
            at_source = [each for each in movable if each.replica_id == source.replica_id]
            if cause == "memory":
                decision = self._relieve(source, replicas, at_source, free_tokens or {})
            else:
                decision = self._lighten(source, replicas, at_source, free_tokens or {})
            if decision is not None:
                self.note_moved(decision.request_id, now_s)
                target = next(each for each in replicas if each.replica_id == decision.target)
                self._went_s[_way(source, target)] = now_s
                self._settled_s = now_s + self._config.settle_s
                return decision
        return None

    # ---- who has a reason

    def _short_of_memory(
        self, now_s: float, replicas: Sequence[ReplicaReport]
    ) -> Iterator[tuple[MoveCause, ReplicaReport]]:
        for source in replicas:
            if self._lasts("memory", source, source.parked_tokens > 0, now_s):
                yield "memory", source

    def _behind(self, now_s: float, replicas: Sequence[ReplicaReport]) -> Iterator[tuple[MoveCause, ReplicaReport]]:
        """Those that are the furthest behind first."""
        least = min((each.behind_tokens for each in replicas), default=0)
        for source in sorted(replicas, key=lambda each: -each.behind_tokens):
            if source.replica_id in self._giving and not self._exceeds(source, least, giving=True):
                self._giving.discard(source.replica_id)
            reason = self._exceeds(source, least, giving=source.replica_id in self._giving)
            if self._lasts("load", source, reason, now_s):
                self._giving.add(source.replica_id)
                yield "load", source

    def _exceeds(self, source: ReplicaReport, behind_tokens: int, *, giving: bool) -> bool:
        return source.behind_tokens >= self._bound(behind_tokens, giving=giving)

    def _bound(self, behind_tokens: int, *, giving: bool) -> float:
        """From how many tokens on a replica gives to one that is behind so many."""
        config = self._config
        if giving:
            return config.stop_ratio * behind_tokens + config.min_gap_tokens / 2
        return config.start_ratio * behind_tokens + config.min_gap_tokens

    def _lasts(self, cause: MoveCause, source: ReplicaReport, reason: bool, now_s: float) -> bool:
        key = (cause, source.replica_id)
        if not reason:
            self._since_s.pop(key, None)
            return False
        return now_s - self._since_s.setdefault(key, now_s) >= self._config.patience_s

    # ---- what is moved where

    def _relieve(
        self,
        source: ReplicaReport,
        replicas: Sequence[ReplicaReport],
        requests: Sequence[MovableRequest],
        free_tokens: FreeTokens,
    ) -> Decision | None:
        """To another pool with twice the room, and not so that the load would come back."""
        for target in sorted(replicas, key=lambda each: each.behind_tokens):
            if target.pool_id == source.pool_id or target.parked_tokens or _way(target, source) in self._went_s:
                continue
            fitting = [
                each
                for each in requests
                if 2 * self._num_routers * each.num_tokens <= free_tokens.get((target.pool_id, each.namespace_id), 0)
                and target.behind_tokens + each.num_tokens <= self._bound(source.behind_tokens, giving=True)
            ]
            if fitting:
                return Decision(_best(fitting).request_id, target.replica_id, "memory")
        return None

    def _lighten(
        self,
        source: ReplicaReport,
        replicas: Sequence[ReplicaReport],
        requests: Sequence[MovableRequest],
        free_tokens: FreeTokens,
    ) -> Decision | None:
        """To the replica that is the least behind; of those, to one of the same pool, where the blocks are."""
        for target in sorted(replicas, key=lambda each: (each.behind_tokens, each.pool_id != source.pool_id)):
            if not self._exceeds(source, target.behind_tokens, giving=True):
                return None
            same_pool = target.pool_id == source.pool_id
            if target.parked_tokens or _way(target, source) in self._went_s:
                continue
            share = (source.behind_tokens - target.behind_tokens) / (2 * self._num_routers)
            fitting = [
                each
                for each in requests
                if each.num_tokens <= share
                and (
                    not each.has_started
                    if same_pool
                    else free_tokens.get((target.pool_id, each.namespace_id), each.num_tokens) >= each.num_tokens
                )
            ]
            if fitting:
                return Decision(_best(fitting).request_id, target.replica_id, "load")
        return None

    def _forget(self, now_s: float, replicas: Sequence[ReplicaReport]) -> None:
        present = {each.replica_id for each in replicas}
        self._since_s = {key: since_s for key, since_s in self._since_s.items() if key[1] in present}
        self._giving &= present
        expired_s = now_s - self._config.cooldown_s
        self._moved_s = {request_id: at_s for request_id, at_s in self._moved_s.items() if at_s > expired_s}
        self._went_s = {way: at_s for way, at_s in self._went_s.items() if at_s > expired_s}

    def check_integrity(self) -> None:
        """Raises IntegrityError if a replica gives away without a reason."""
        for replica_id in self._giving:
            if ("load", replica_id) not in self._since_s:
                raise IntegrityError(f"replica {replica_id} gives requests away without a reason")


def _way(source: ReplicaReport, target: ReplicaReport) -> tuple[str, str]:
    if source.pool_id == target.pool_id:
        return source.replica_id, target.replica_id
    return source.pool_id, target.pool_id


def _best(requests: Sequence[MovableRequest]) -> MovableRequest:
    """What has not started, for it is free; then the largest, for fewer moves; then the newest."""
    return max(reversed(requests), key=lambda each: (not each.has_started, each.num_tokens))
