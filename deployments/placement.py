"""Which replica takes a request: where most of its prompt is cached, with bounded load.

    owner's pool ─► pools by blocks of the prompt that they are known to have ─► by rendezvous hash of its first blocks
                    (those in which requests wait for memory last)

Requests that begin alike go to one pool; replicas of a pool share its blocks, so among those the least loaded one is
taken. No replica is loaded beyond 1.25 times the mean (design §7.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from remora.namespaces.rendezvous import rendezvous_score
from remora.platform.base.ids import PoolId, ReplicaId

#: A replica takes a request if its load afterwards is at most this times the mean.
LOAD_BOUND = 1.25

RouteReason = Literal["only", "owner", "prefix", "load", "moved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A connected replica of the request's model."""

    replica_id: ReplicaId
    pool_id: PoolId
    #: Tokens queued and running.
    load_tokens: int
    #: Whether requests wait there for KV.
    lacks_memory: bool = False


class Choice(NamedTuple):
    replica_id: ReplicaId
    reason: RouteReason
    #: For "load": a replica of the pool that was preferred, where the blocks may be.
    home: ReplicaId | None = None


def place(
    key: bytes,
    candidates: Sequence[Candidate],
    request_tokens: int,
    owner: ReplicaId | None = None,
    overlap: Mapping[PoolId, int] | None = None,
) -> Choice:
    """The replica for a request of `request_tokens` tokens. `candidates` must not be empty. `overlap`: pool → blocks of
    the prompt that are cached there.

    "owner": the session's last replica; "prefix": in the pool that comes first; "load": that was loaded beyond the
    bound; "only": there was no choice. ("moved" is not decided here.)
    """
    if not candidates:
        raise ValueError("place() needs at least one candidate")
    if len(candidates) == 1:
        return Choice(candidates[0].replica_id, "only")
    mean = (sum(candidate.load_tokens for candidate in candidates) + request_tokens) / len(candidates)
    # A request larger than the bound must still be possible on an idle replica.
    limit = max(LOAD_BOUND * mean, request_tokens)
    home = next((candidate for candidate in candidates if candidate.replica_id == owner), None)
    if home is not None and home.load_tokens + request_tokens <= limit:
        return Choice(home.replica_id, "owner")
    home_pool = None if home is None else home.pool_id
    known = overlap or {}
    # Of a pool that others wait for, nothing is to be had soon.
    full = {each.pool_id for each in candidates if each.lacks_memory}
    pools = sorted(
        {each.pool_id for each in candidates},
        key=lambda pool: (
            pool != home_pool,
            pool in full,
            -known.get(pool, 0),
            -rendezvous_score(key, pool),
            pool,
        ),
    )
    preferred = next(candidate.replica_id for candidate in candidates if candidate.pool_id == pools[0])
    for rank, pool_id in enumerate(pools):
        members = [candidate for candidate in candidates if candidate.pool_id == pool_id]
        best = least_loaded(members)
        if best.load_tokens + request_tokens <= limit:
            return Choice(best.replica_id, "load", preferred) if rank else Choice(best.replica_id, "prefix")
    return Choice(least_loaded(candidates).replica_id, "load", preferred)


def least_loaded(candidates: Iterable[Candidate]) -> Candidate:
    """Of one or more; of equal ones always the same."""
    return min(candidates, key=lambda candidate: (candidate.load_tokens, candidate.replica_id))
