"""Wakes models that sleep: their replicas were stopped because nobody asked for them (cache_actors/model_sleep.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from remora.deployments.router_stats import RouterStats
from remora.platform.base.errors import IntegrityError, RemoraError, Unavailable
from remora.platform.base.ids import ModelId
from remora.platform.base.model_config import ModelConfig

logger = logging.getLogger(__name__)

#: Says that a model is wanted; True for the one call in the cluster that ended its sleep. Raises RemoraError.
Wake = Callable[[ModelId], Awaitable[bool]]
#: The word is said again for as long as no replica has come: it may have crossed the end of the last one.
_REPEAT_S = 2.0


class Waker:
    """Owned by the router's event loop. However many requests wait for a model, one task asks for it."""

    def __init__(
        self,
        models: Mapping[ModelId, ModelConfig],
        wake: Wake | None,
        *,
        is_ready: Callable[[ModelId], bool],
        stats: RouterStats,
        queue_timeout_s: float,
    ) -> None:
        """Without `wake` no model sleeps."""
        self._models = models
        self._wake = wake
        self._is_ready = is_ready
        self._stats = stats
        self._queue_timeout_s = queue_timeout_s
        #: Of models that are being woken: set when a replica has come.
        self._arrivals: dict[ModelId, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def can_sleep(self, model_id: ModelId) -> bool:
        """Whether the model may have no replica and yet serve requests."""
        return self._wake is not None and self._models[model_id].idle_timeout_s is not None

    def max_wait_s(self, model_id: ModelId) -> float:
        """Longest that a request waits for a replica of the model."""
        if not self.can_sleep(model_id):
            return self._queue_timeout_s
        return max(self._queue_timeout_s, self._models[model_id].wake_timeout_s)

    def need(self, model_id: ModelId) -> None:
        """A request waits for a replica of the model."""
        if self._is_ready(model_id) or model_id in self._arrivals or not self.can_sleep(model_id):
            return
        arrival = self._arrivals[model_id] = asyncio.Event()
        task = asyncio.create_task(self._ask(model_id, arrival), name=f"wake-{model_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def arrived(self, model_id: ModelId) -> None:
        """A replica of the model is connected."""
        arrival = self._arrivals.pop(model_id, None)
        if arrival is not None:
            arrival.set()

    async def ready(self, model_id: ModelId) -> None:
        """Returns with a replica of a model that can sleep; at once for any other. Raises Unavailable after the
        longest wait."""
        self.need(model_id)
        arrival = self._arrivals.get(model_id)
        if arrival is None:
            return
        try:
            async with asyncio.timeout(self.max_wait_s(model_id)):
                await arrival.wait()
        except TimeoutError:
            raise Unavailable(f"The model {model_id!r} sleeps, and did not wake in time; try again.") from None

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._arrivals.clear()

    async def _ask(self, model_id: ModelId, arrival: asyncio.Event) -> None:
        assert self._wake is not None, "only models that can be woken sleep"
        loop = asyncio.get_running_loop()
        started_s, ended_sleep = loop.time(), False
        # Who waits at the end of this time has been answered; the next request starts over.
        while not arrival.is_set() and loop.time() - started_s < self.max_wait_s(model_id):
            try:
                ended_sleep |= await self._wake(model_id)
            except RemoraError as error:
                logger.warning("waking %s: %s", model_id, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPEAT_S):
                    await arrival.wait()
        if self._arrivals.get(model_id) is arrival:
            del self._arrivals[model_id]
        elif ended_sleep:
            self._stats.woke(model_id, loop.time() - started_s)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a model is being woken by nobody."""
        if len(self._arrivals) > len(self._tasks):
            raise IntegrityError(f"models {set(self._arrivals)} are waited for, but not all are asked for")
