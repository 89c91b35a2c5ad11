"""How answers and events of a pool in this process reach an engine."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

#: Within `send`; when the test says so; or from threads, a little later.
Delivery = Literal["inline", "manual", "threads"]
_MAX_DELAY_S: Final = 0.002
Deliver = Callable[[], None]


class Lane:
    """Hands over in order what comes one after another."""

    def __init__(self, delivery: Delivery, seed: int) -> None:
        """`seed` fixes the delays of a thread."""
        self._delivery = delivery
        self._waiting: deque[Deliver] = deque()
        self._pending: queue.SimpleQueue[Deliver | None] = queue.SimpleQueue()
        if delivery == "threads":
            args = (self._pending, random.Random(seed))
            threading.Thread(target=_deliver_slowly, args=args, name="local-pool", daemon=True).start()

    def hand_over(self, deliver: Deliver) -> None:
        if self._delivery == "inline":
            deliver()
        elif self._delivery == "manual":
            self._waiting.append(deliver)
        else:
            self._pending.put(deliver)

    def deliver(self, most: int | None = None) -> int:
        """Manual delivery: hands over the next ones; returns how many."""
        count = 0
        while self._waiting and (most is None or count < most):
            self._waiting.popleft()()
            count += 1
        return count

    def close(self) -> None:
        """Ends the thread."""
        self._pending.put(None)


def _deliver_slowly(pending: queue.SimpleQueue[Deliver | None], delays: random.Random) -> None:
    while (deliver := pending.get()) is not None:
        time.sleep(delays.uniform(0.0, _MAX_DELAY_S))
        deliver()
