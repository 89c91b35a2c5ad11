"""What each model is: ready, asleep, or on its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

from remora.deployments.router import RouterCore
from remora.platform.base.errors import RemoraError
from remora.platform.base.ids import ModelId

logger = logging.getLogger(__name__)

#: asleep: its replicas were stopped because nobody asked for it, and the next request starts them. starting: some are
#: starting, for the first time, after a loss, or because a request woke the model.
ModelState = Literal["ready", "asleep", "starting"]
#: Model → replicas that Serve runs or starts. Raises RemoraError.
CountReplicas = Callable[[], Awaitable[Mapping[str, int]]]
_TIMEOUT_S = 2.0


class ModelStates:
    """A router's view. Serve, which knows what is wanted, is asked only while a model that may sleep has no replica."""

    def __init__(self, core: RouterCore, count_replicas: CountReplicas) -> None:
        self._core = core
        self._count_replicas = count_replicas

    async def all(self) -> dict[ModelId, ModelState]:
        """Of every configured model. When Serve does not answer, one without a replica counts as starting."""
        core = self._core
        states: dict[ModelId, ModelState] = {
            model_id: "ready" if core.fleet.is_ready(model_id) else "starting" for model_id in core.catalog.models
        }
        unclear = [
            model_id for model_id, state in states.items() if state != "ready" and core.waker.can_sleep(model_id)
        ]
        if unclear:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    counts = await self._count_replicas()
            except (RemoraError, TimeoutError) as error:
                logger.warning("Serve does not say which models sleep: %s", error)
                return states
            states.update({model_id: "asleep" for model_id in unclear if not counts.get(model_id)})
        return states
