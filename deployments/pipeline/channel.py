"""The hop between two stages, whatever carries it: ring.py does on one node, link_hop.py between two.

One writer and one reader, a thread each. Both hold a bounded number of bytes; whoever is faster waits. The end of the
other side shows as StageLost: at once when its process has died, or at the deadline of the call.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class HopSender(Protocol):
    """One thread writes messages in place. Deadlines are of time.monotonic."""

    def reserve(self, num_bytes: int, deadline_s: float) -> Bytes:
        """Where to write the next message. Waits while the other side is behind; raises StageLost when it is gone or
        still behind at the deadline."""
        ...

    def commit(self) -> None:
        """Sends what `reserve` gave, at once."""
        ...

    def close(self) -> None:
        """Tells the other side that nothing more comes."""
        ...


class HopReceiver(Protocol):
    """One thread reads messages in place, in the order in which they were sent."""

    @property
    def capacity(self) -> int:
        """Bytes of messages (ring.message_room) that find room here, whether they are read or not."""
        ...

    def has_message(self) -> bool: ...

    def peek(self, deadline_s: float) -> Bytes:
        """The oldest message, until `release`. Waits for it; raises StageLost when the other side has closed, is gone,
        or sends nothing until the deadline."""
        ...

    def release(self) -> None: ...

    def close(self) -> None:
        """Tells the other side that nothing more is read."""
        ...
