"""Which models sleep: their replicas are stopped while nobody asks for them, and started again by the first who does.

    replica ── wants_sleep ──► registry ── 0 replicas ──► Serve        KV stays in the pools
    router ─── wake ─────────► registry ── n replicas ──► Serve

Serve keeps the number that is wanted, also over the death of its controller or of the registry. So nothing here must
be remembered: a model sleeps when Serve wants no replica of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from remora.cache_actors.registry_state import ReplicaRecord
from remora.platform.base.errors import Conflict, IntegrityError, RemoraError
from remora.platform.base.ids import ModelId, ReplicaId

logger = logging.getLogger(__name__)


class Scaler(Protocol):
    """How many replicas Serve is to run of a model (serve_scaler.py). Raises Unavailable when Serve does not answer."""

    async def wanted(self, app_name: str, model_id: ModelId) -> int: ...

    async def scale(self, app_name: str, model_id: ModelId, num_replicas: int) -> None:
        """Raises Conflict when the application may not be scaled so."""
        ...


class ModelSleep:
    """Owned by the registry's event loop; what concerns one model happens in turn."""

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler
        self._locks: defaultdict[ModelId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._asleep: set[ModelId] = set()
        #: Replicas that are being stopped; what they still report counts no more.
        self._stopping: set[ReplicaId] = set()
        #: Replicas whose application may not be scaled: told once.
        self._sleepless: set[ReplicaId] = set()

    async def wake(self, app_name: str, model_id: ModelId, num_replicas: int) -> bool:
        """Lets a model that sleeps have its replicas. True for the one call that ended its sleep."""
        async with self._locks[model_id]:
            # How many a model has that is only starting, or being replaced, is the configuration's affair.
            if model_id not in self._asleep and await self._scaler.wanted(app_name, model_id):
                return False
            await self._scaler.scale(app_name, model_id, num_replicas)
            self._asleep.discard(model_id)
        logger.info("model %s is woken", model_id)
        return True

    async def look(self, model_id: ModelId, records: Iterable[ReplicaRecord]) -> None:
        """Puts the model to sleep if every replica of it wants to. `records` are all that are known of it."""
        own = self._own(records)
        if own:
            self._asleep.discard(model_id)  # a new configuration has started it
        if not own or not all(_may_stop(each) and each.replica_id not in self._sleepless for each in own):
            return
        if self._locks[model_id].locked():
            return  # it is being woken, or stopped already
        try:
            await self._stop(model_id, own)
        except RemoraError as error:
            if isinstance(error, Conflict):
                self._sleepless.update(each.replica_id for each in own)
            logger.warning("model %s stays awake: %s", model_id, error)

    async def sleep_now(self, app_name: str, model_id: ModelId, records: Iterable[ReplicaRecord]) -> None:
        """Does the same at once for a model that has nothing to do. Raises Conflict for any other, Unavailable."""
        own = self._own(records)
        if any(each.load.num_running or each.load.num_waiting for each in own):
            raise Conflict(f"model: {model_id} is busy; drain its replicas, or try again when they are idle.")
        if own:
            await self._stop(model_id, own)
        elif await self._scaler.wanted(app_name, model_id):
            raise Conflict(f"model: {model_id} is starting; try again when it is ready.")

    def forget(self, replica_id: ReplicaId) -> None:
        """The replica has left the directory."""
        self._stopping.discard(replica_id)
        self._sleepless.discard(replica_id)

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant is broken."""
        if self._stopping & self._sleepless:
            raise IntegrityError(f"replicas {self._stopping & self._sleepless} stop though they may not")

    def _own(self, records: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
        return [each for each in records if each.replica_id not in self._stopping]

    async def _stop(self, model_id: ModelId, own: list[ReplicaRecord]) -> None:
        async with self._locks[model_id]:
            await self._scaler.scale(own[0].app_name, model_id, 0)
            self._stopping.update(each.replica_id for each in own)
            self._asleep.add(model_id)
        logger.info("model %s sleeps: %d replicas stop", model_id, len(own))


def _may_stop(record: ReplicaRecord) -> bool:
    return record.status == "ready" and record.load.wants_sleep
