"""Work on a pool that takes many rounds: others' calls come in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from remora.cache_actors.pool_settings import POOL_LEASE
from remora.kernels.reencoder import prepare
from remora.namespaces.commands import AnyAnswer, AnyCommand, Compact, Compacted
from remora.namespaces.quantise_commands import Quantise, Quantised
from remora.platform.base.ids import NamespaceId

#: Applies commands of the pool itself.
Commit = Callable[[list[AnyCommand]], list[AnyAnswer]]

#: How long a compaction goes on when blocks are in use, and how often it looks whether they have been let go.
_COMPACTION_S: Final = 10.0
_COMPACTION_PAUSE_S: Final = 0.02
#: How long blocks are re-encoded in one go; what is left then is said.
_QUANTISATION_S: Final = 20.0


async def quantise(commit: Commit, command: Quantise) -> AnyAnswer:
    """Re-encodes what a namespace has cached, until nothing is left that can be. Quantised with what all rounds did, or
    Refused."""
    await asyncio.to_thread(prepare, command.target.geometry)
    total: Quantised | None = None
    deadline_s = time.monotonic() + _QUANTISATION_S
    while True:
        answer = commit([msgspec.structs.replace(command, lease_id=POOL_LEASE, call_no=0)])[0]
        if not isinstance(answer, Quantised):
            return answer
        before = total or Quantised(before_bytes=answer.before_bytes)
        total = Quantised(
            num_converted_blocks=before.num_converted_blocks + answer.num_converted_blocks,
            num_freed_blocks=before.num_freed_blocks + answer.num_freed_blocks,
            num_left_blocks=answer.num_left_blocks,
            before_bytes=before.before_bytes,
            after_bytes=answer.after_bytes,
        )
        is_done = not answer.num_converted_blocks and not answer.num_freed_blocks
        if is_done or time.monotonic() > deadline_s:
            return total
        await asyncio.sleep(0)


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
