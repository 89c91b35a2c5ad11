"""Asks every pool of the cluster how it is."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError

from remora.cache_actors.pool_actor import find_pools
from remora.cache_actors.pool_messages import PoolDescription

logger = logging.getLogger(__name__)

#: A pool that is restarting is left out of an answer rather than waited for.
TIMEOUT_S = 2.0


class ClusterPools:
    """The pools of one cluster name, found anew when one does not answer."""

    def __init__(self, cluster_name: str) -> None:
        self._cluster_name = cluster_name

    async def reports(self) -> dict[str, PoolDescription]:
        """Pool id → description, of those that answer in time."""
        pools = await asyncio.to_thread(find_pools, self._cluster_name)
        described = await asyncio.gather(*(self._describe(pool) for pool in pools))
        return {str(each.binding.pool_id): each for each in described if each is not None}

    async def _describe(self, pool: Any) -> PoolDescription | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                description: PoolDescription = await pool.describe.remote()
                return description
        except (RayError, TimeoutError) as error:
            logger.warning("a pool does not answer: %s", str(error).partition("\n")[0])
            return None
