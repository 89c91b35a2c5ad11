"""By when requests must have started."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from remora.deployments.engine.live_request import LiveRequest
from remora.deployments.engine.messages import GenerationRequest
from remora.platform.base.errors import OverQuota

#: When a request that found no memory in time may try again.
RETRY_AFTER_S = 2.0


def too_late(request: GenerationRequest) -> OverQuota:
    """The end of a request that has not started in time."""
    return OverQuota(
        f"Namespace {request.namespace_id!r} had no memory or no place for this request within "
        f"{request.queue_timeout_s:g} s; try again later.",
        retry_after_s=RETRY_AFTER_S,
    )


class Deadlines:
    """Engine thread only."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, LiveRequest]] = []
        self._numbers = itertools.count()

    def add(self, live: LiveRequest) -> None:
        heapq.heappush(self._heap, (live.deadline_s, next(self._numbers), live))

    def due(self, now_s: float) -> Iterator[LiveRequest]:
        """Those whose time is over and that have not started, once each; they may have ended meanwhile."""
        while self._heap and self._heap[0][0] <= now_s:
            live = heapq.heappop(self._heap)[2]
            if not live.has_started:
                yield live
