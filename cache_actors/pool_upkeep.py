"""Work on a pool that takes many rounds: others' calls come in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from remora.cache_actors.pool_settings import POOL_LEASE
from remora.namespaces.commands import AnyAnswer, AnyCommand, Compact, Compacted
from remora.platform.base.ids import NamespaceId

#: Applies commands of the pool itself.
Commit = Callable[[list[AnyCommand]], list[AnyAnswer]]

#: How long a compaction goes on when blocks are in use, and how often it looks whether they have been let go.
_COMPACTION_S: Final = 10.0
_COMPACTION_PAUSE_S: Final = 0.02


async def compact(commit: Commit, namespace_id: NamespaceId) -> AnyAnswer:
    """Moves the blocks of a namespace's geometries together. Compacted with what all rounds did, or Refused."""
    total = Compacted()
    deadline_s = time.monotonic() + _COMPACTION_S
    while True:
        answer = commit([Compact(lease_id=POOL_LEASE, namespace_id=namespace_id)])[0]
        if not isinstance(answer, Compacted):
            return answer
        total = Compacted(
            num_moved_blocks=total.num_moved_blocks + answer.num_moved_blocks,
            num_moving_blocks=answer.num_moving_blocks,
            num_released_extents=total.num_released_extents + answer.num_released_extents,
            num_extents=answer.num_extents,
        )
        is_done = not answer.num_moved_blocks and not answer.num_moving_blocks
        if is_done or time.monotonic() > deadline_s:
            return total
        await asyncio.sleep(_COMPACTION_PAUSE_S if answer.num_moving_blocks else 0)
