"""Tells every pool of a cluster that sessions are over, so that their cached blocks go before others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from ray.exceptions import RayError

from remora.cache_actors.pool_handles import find_pools
from remora.platform.base.ids import SessionId

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 5.0


async def end_sessions(cluster_name: str, session_ids: Sequence[SessionId]) -> None:
    """A pool that does not answer keeps the blocks until nobody has used them for long enough."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            pools = await asyncio.to_thread(find_pools, cluster_name)
            await asyncio.gather(*(pool.end_sessions.remote(list(session_ids)) for pool in pools))
    except (RayError, TimeoutError, ValueError) as error:
        logger.warning("a pool was not told that %d sessions ended: %s", len(session_ids), error)
