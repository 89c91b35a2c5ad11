"""The two sides of the registry: a replica's membership, and a reader's copy that follows the changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from ray.exceptions import RayError

from remora.cache_actors.registry_state import DirectoryCopy, ReplicaLoad, ReplicaRecord, ReplicaStatus
from remora.platform.base.ids import ModelId, ReplicaId

logger = logging.getLogger(__name__)


class RegistryMember:
    """Keeps one replica registered; lives on the replica's event loop."""

    def __init__(
        self,
        registry: Any,
        record: ReplicaRecord,
        report: Callable[[], tuple[ReplicaStatus, ReplicaLoad]],
        *,
        heartbeat_s: float = 1.0,
    ) -> None:
        """`report` is asked at every heartbeat and must return at once."""
        self._registry = registry
        self._record = record
        self._report = report
        self._heartbeat_s = heartbeat_s
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def report_now(self) -> None:
        """Does not wait for the next heartbeat."""
        self._hurry.set()

    async def start(self) -> None:
        """Registers, then goes on in the background."""
        await self._beat(known=False)
        self._task = asyncio.create_task(self._run(), name="registry-heartbeat")

    async def stop(self) -> None:
        """Leaves the directory. Quiet when the registry cannot be reached: it notices by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        with contextlib.suppress(RayError):
            await self._registry.unregister.remote(self._record.replica_id)

    async def _run(self) -> None:
        known = True
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._heartbeat_s)
            self._hurry.clear()
            try:
                known = await self._beat(known)
            except RayError as error:
                logger.warning("the registry cannot be reached, trying again: %s", str(error).partition("\n")[0])

    async def _beat(self, known: bool) -> bool:
        status, load = self._report()
        if known:
            known = await self._registry.heartbeat.remote(self._record.replica_id, status, load)
        if not known:
            await self._registry.register.remote(msgspec.structs.replace(self._record, status=status, load=load))
        return True


class ReplicaDirectory:
    """A copy of the directory that follows the registry; lives on an event loop (a router's)."""

    def __init__(self, registry: Any, on_change: Callable[[], None] | None = None) -> None:
        """`on_change` is called on the loop after each update and must return at once."""
        self._registry = registry
        self._on_change = on_change
        self._copy = DirectoryCopy()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns with a first copy; follows in the background."""
        self._copy.update(await self._registry.wait_changes.remote("", 0, 0.0))
        self._task = asyncio.create_task(self._follow(), name="registry-directory")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def replicas(self, model_id: ModelId | None = None) -> tuple[ReplicaRecord, ...]:
        """Replicas of a model (of all models), as last heard."""
        return self._copy.replicas(model_id)

    async def report_dead(self, replica_id: ReplicaId, reason: str) -> None:
        """Tells everybody that a replica was seen dead. Quiet when the registry cannot be reached."""
        with contextlib.suppress(RayError):
            await self._registry.mark_dead.remote(replica_id, reason)

    async def _follow(self) -> None:
        while True:
            try:
                changes = await self._registry.wait_changes.remote(self._copy.incarnation, self._copy.version, 10.0)
            except RayError as error:
                logger.warning(
                    "the registry cannot be reached, keeping the last copy: %s", str(error).partition("\n")[0]
                )
                await asyncio.sleep(0.5)
                continue
            before = (self._copy.incarnation, self._copy.version)
            self._copy.update(changes)
            if self._on_change is not None and before != (self._copy.incarnation, self._copy.version):
                self._on_change()
