"""Which models sleep: their replicas are stopped while nobody asks for them, and started again by the first who does.

    replica ── wants_sleep ──► registry ── 0 replicas ──► Serve        KV stays in the pools
    router ─── wake ─────────► registry ── n replicas ──► Serve

Serve keeps the number that is wanted, also over the death of its controller or of the registry. So nothing here must
be remembered: a model whose number is set twice is woken once.
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


class Scale(Protocol):
    """Tells Serve how many replicas a model is to have (serve_scaler.py)."""

    async def __call__(self, app_name: str, model_id: ModelId, num_replicas: int) -> None:
        """Raises Conflict when the application may not be scaled so, Unavailable when Serve does not answer."""
        ...


class ModelSleep:
    """Owned by the registry's event loop; what concerns one model happens in turn."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._locks: defaultdict[ModelId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._asleep: set[ModelId] = set()
        #: Replicas that are being stopped; what they still report counts no more.
        self._stopping: set[ReplicaId] = set()
        #: Replicas whose application may not be scaled: told once.
        self._sleepless: set[ReplicaId] = set()

    async def wake(self, app_name: str, model_id: ModelId, num_replicas: int) -> bool:
        """Lets the model have its replicas. True for the one call that ended its sleep, as far as is remembered."""
        async with self._locks[model_id]:
            await self._scale(app_name, model_id, num_replicas)
            was_asleep = model_id in self._asleep
            self._asleep.discard(model_id)
        if was_asleep:
            logger.info("model %s is woken", model_id)
        return was_asleep

    async def look(self, records: Iterable[ReplicaRecord]) -> None:
        """Puts the records' model to sleep if every replica of it wants to. `records` are all that are known of it."""
        model_id, own = self._own(records)
        if own:
            self._asleep.discard(model_id)  # a new configuration has started it
        if not own or not all(_may_stop(each) and each.replica_id not in self._sleepless for each in own):
            return
        try:
            await self._stop(model_id, own)
        except RemoraError as error:
            if isinstance(error, Conflict):
                self._sleepless.update(each.replica_id for each in own)
            logger.warning("model %s stays awake: %s", model_id, error)

    async def sleep_now(self, records: Iterable[ReplicaRecord]) -> None:
        """Does the same at once for a model that has nothing to do. Raises Conflict if it has, Unavailable."""
        model_id, own = self._own(records)
        busy = [each for each in own if each.load.num_running or each.load.num_waiting]
        if busy:
            raise Conflict(f"model: {model_id} is busy; drain its replicas, or try again when they are idle.")
        if own:
            await self._stop(model_id, own)

    def forget(self, replica_id: ReplicaId) -> None:
        """The replica has left the directory."""
        self._stopping.discard(replica_id)
        self._sleepless.discard(replica_id)

    def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant is broken."""
        if self._stopping & self._sleepless:
            raise IntegrityError(f"replicas {self._stopping & self._sleepless} stop though they may not")

    def _own(self, records: Iterable[ReplicaRecord]) -> tuple[ModelId, list[ReplicaRecord]]:
        known = list(records)
        own = [each for each in known if each.replica_id not in self._stopping and each.status != "lost"]
        return (known[0].model_id if known else ModelId("")), own

    async def _stop(self, model_id: ModelId, own: list[ReplicaRecord]) -> None:
        lock = self._locks[model_id]
        if lock.locked():
            return  # it is being woken, or stopped already
        async with lock:
            await self._scale(own[0].app_name, model_id, 0)
            self._stopping.update(each.replica_id for each in own)
            self._asleep.add(model_id)
        logger.info("model %s sleeps: %d replicas stop", model_id, len(own))


def _may_stop(record: ReplicaRecord) -> bool:
    return record.status == "ready" and record.load.wants_sleep
