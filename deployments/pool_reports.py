"""Asks every pool of the cluster how it is, and tells pools what operators want."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from ray.exceptions import RayError

from remora.cache_actors.pool_handles import find_pools
from remora.cache_actors.pool_messages import PoolBinding, PoolDescription
from remora.namespaces.commands import Compacted, Quota, Refused, Trimmed
from remora.namespaces.geometry import KVPrecision
from remora.namespaces.quantise_commands import Quantise, Quantised
from remora.namespaces.quota_changes import change_of, quota_of
from remora.namespaces.report import NamespaceReport
from remora.platform.base.errors import InvalidRequest, Unavailable
from remora.platform.base.ids import BlockHash, NamespaceId

logger = logging.getLogger(__name__)

#: A pool that is restarting is left out of an answer rather than waited for.
TIMEOUT_S = 2.0
#: Trimming and compacting take their time.
_LONG_TIMEOUT_S = 30.0

Result = TypeVar("Result")


class ClusterPools:
    """The pools of one cluster name, found anew when one does not answer."""

    def __init__(self, cluster_name: str) -> None:
        self._cluster_name = cluster_name

    async def reports(self) -> dict[str, PoolDescription]:
        """Pool id → description, of those that answer in time."""
        return {str(each.binding.pool_id): each for _, each in await self._described()}

    async def _described(self) -> list[tuple[Any, PoolDescription]]:
        pools = await asyncio.to_thread(find_pools, self._cluster_name)
        described = await asyncio.gather(*(_try(_describe(pool)) for pool in pools))
        return [(pool, each) for pool, each in zip(pools, described, strict=True) if each is not None]

    async def set_quota(
        self, namespace_id: NamespaceId, change: Callable[[Quota], Quota], kv_precision: KVPrecision | None = None
    ) -> None:
        """Changes the quota of a namespace, and its precision if one is given, in every pool that has it, or in none.

        Raises InvalidRequest with the pool's reason, Unavailable when no pool that has it answers.
        """
        done: list[tuple[Any, NamespaceReport]] = []
        for pool, _, report in await self._holders(namespace_id):
            command = change_of(report, change(quota_of(report)))
            if kv_precision is not None:
                command = msgspec.structs.replace(command, kv_precision=kv_precision)
            answer = await _ask(pool.set_quota.remote(command))
            if isinstance(answer, Refused):
                for changed, before in reversed(done):
                    await _ask(changed.set_quota.remote(change_of(before, quota_of(before))))
                raise InvalidRequest(answer.message, field="guaranteed")
            done.append((pool, report))

    async def trim(self, namespace_id: NamespaceId, target_bytes: int | None) -> dict[str, Trimmed]:
        """Gives up the namespace's cache down to a size in each pool, by default its guarantee there. By pool."""
        return await self._of_each(namespace_id, "trim", Trimmed, target_bytes)

    async def compact(self, namespace_id: NamespaceId) -> dict[str, Compacted]:
        """Moves the blocks of the namespace's geometry together in each pool. By pool."""
        return await self._of_each(namespace_id, "compact", Compacted)

    async def quantise(self, namespace_id: NamespaceId, command: Quantise) -> dict[str, Quantised]:
        """Re-encodes what the namespace has cached in each pool. By pool. Raises InvalidRequest if one cannot."""
        return await self._of_each(namespace_id, "quantise", Quantised, msgspec.msgpack.encode(command))

    async def _of_each(
        self, namespace_id: NamespaceId, method: str, kind: type[Result], *arguments: Any
    ) -> dict[str, Result]:
        holders = await self._holders(namespace_id)
        calls = [
            _ask(getattr(pool, method).remote(namespace_id, *arguments), timeout_s=_LONG_TIMEOUT_S)
            for pool, *_ in holders
        ]
        found: dict[str, Result] = {}
        for (_, pool_id, _), answer in zip(holders, await asyncio.gather(*calls), strict=True):
            if isinstance(answer, Refused):
                raise answer.as_error()
            if not isinstance(answer, kind):
                raise Unavailable(f"Pool {pool_id} did not {method} {namespace_id!r}: {answer}")
            found[pool_id] = answer
        return found

    async def _holders(self, namespace_id: NamespaceId) -> list[tuple[Any, str, NamespaceReport]]:
        """Pools that have the namespace: handle, id, what they say about it."""
        found = [
            (pool, str(description.binding.pool_id), report)
            for pool, description in await self._described()
            for report in description.report.namespaces
            if report.namespace_id == namespace_id
        ]
        if not found:
            raise Unavailable(f"No pool with namespace {namespace_id!r} answers; try again.")
        return found

    async def find_blocks(
        self, namespace_id: NamespaceId, fingerprint: bytes, hashes: Sequence[BlockHash]
    ) -> dict[str, int]:
        """Pool id → how many of the first blocks of a chain it has, of those that answer in time."""
        pools = await asyncio.to_thread(find_pools, self._cluster_name)

        async def find(pool: Any) -> tuple[str, int]:
            binding = msgspec.msgpack.decode(await pool.binding.remote(), type=PoolBinding)
            return str(binding.pool_id), int(await pool.find_blocks.remote(namespace_id, fingerprint, tuple(hashes)))

        found = await asyncio.gather(*(_try(find(pool)) for pool in pools))
        return dict(each for each in found if each is not None)


async def _describe(pool: Any) -> PoolDescription:
    description: PoolDescription = await pool.describe.remote()
    return description


async def _try(call: Awaitable[Result]) -> Result | None:
    """None when the pool does not answer in time: its part of an answer is left out."""
    try:
        return await _ask(call)
    except Unavailable as error:
        logger.warning("%s", error)
        return None


async def _ask(call: Awaitable[Result], *, timeout_s: float = TIMEOUT_S) -> Result:
    """Raises Unavailable when the pool does not answer in time; what it was asked may have happened."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except (RayError, TimeoutError) as error:
        raise Unavailable(f"A pool does not answer: {str(error).partition(chr(10))[0]}; try again.") from None
