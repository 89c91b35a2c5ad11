"""A made-up but repeatable workload: customer service, where sessions and priorities are known.

Three kinds of sessions share the machine: live chats with a waiting customer (priority 2), ordinary chats (priority 0)
and tickets that are worked on in the background (priority -2). All begin with one of four system prompts and a file on
the customer; each turn sends the whole conversation so far and a few new blocks. Customers of live chats answer within
a minute and stay long, tickets come back after half an hour or never. The application closes most sessions; the others
are simply left. Nothing in it knows any eviction policy.
"""

from __future__ import annotations

import heapq
from random import Random
from typing import NamedTuple

from remora.namespaces.trace import TraceRequest

#: Seed for tuning, and the seeds that results are reported on. Fixed before any policy used sessions or priorities.
TUNING_SEED = 1
REPORT_SEEDS = (11, 12, 13)

_NUM_SYSTEM_PROMPTS = 4
_SYSTEM_BLOCKS = 8
#: Share of sessions that the application closes with their last request.
_CLOSED = 0.8


class _Kind(NamedTuple):
    priority: int
    #: Of all sessions.
    share: float
    mean_turns: float
    mean_pause_s: float
    file_blocks: tuple[int, int]


_KINDS = (
    _Kind(2, 0.2, 12.0, 40.0, (10, 40)),
    _Kind(0, 0.4, 6.0, 180.0, (5, 20)),
    _Kind(-2, 0.4, 2.0, 1800.0, (20, 80)),
)
_NEW_BLOCKS_A_TURN = (1, 5)
#: A conversation of so many blocks is ended.
_MAX_BLOCKS = 240


def customer_service(seed: int, *, duration_s: float = 3600.0, sessions_per_s: float = 0.25) -> list[TraceRequest]:
    """Requests in order of time; equal arguments give equal requests."""
    source = Random(seed)
    #: (time, session number, kind, blocks so far)
    turns: list[tuple[float, int, int, tuple[int, ...]]] = []
    requests: list[TraceRequest] = []
    next_block = _NUM_SYSTEM_PROMPTS * _SYSTEM_BLOCKS
    arrival_s, number = 0.0, 0
    while (arrival_s := arrival_s + source.expovariate(sessions_per_s)) < duration_s:
        number += 1
        kind_no = source.choices(range(len(_KINDS)), [each.share for each in _KINDS])[0]
        first = source.randrange(_NUM_SYSTEM_PROMPTS) * _SYSTEM_BLOCKS
        turns.append((arrival_s, number, kind_no, tuple(range(first, first + _SYSTEM_BLOCKS))))
    heapq.heapify(turns)
    while turns:
        now_s, number, kind_no, blocks = heapq.heappop(turns)
        kind = _KINDS[kind_no]
        num_new = source.randint(*_NEW_BLOCKS_A_TURN)
        if len(blocks) == _SYSTEM_BLOCKS:
            num_new += source.randint(*kind.file_blocks)
        blocks += tuple(range(next_block, next_block + num_new))
        next_block += num_new
        is_last = len(blocks) >= _MAX_BLOCKS or source.random() < 1 / kind.mean_turns
        request = TraceRequest(
            timestamp=int(1000 * now_s),
            hash_ids=blocks,
            session_id=f"session-{number}",
            priority=kind.priority,
            ends_session=is_last and source.random() < _CLOSED,
        )
        requests.append(request)
        if not is_last:
            again_s = now_s + 5.0 + source.expovariate(1 / kind.mean_pause_s)
            heapq.heappush(turns, (again_s, number, kind_no, blocks))
    return requests
