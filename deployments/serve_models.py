"""The models' replicas as Ray Serve runs them: how many there are, and having them stopped and started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from remora.platform.base.errors import RemoraError, Unavailable
from remora.platform.base.ids import ModelId
from remora.platform.base.model_config import ModelConfig

Result = TypeVar("Result")

_STOPPING = "STOPPING"


class ServeModels:
    """Of one application. The registry does the stopping and starting, so that several routers do it once."""

    def __init__(self, app_name: str, registry: Any, models: Sequence[ModelConfig]) -> None:
        self._app_name = app_name
        self._registry = registry
        self._num_replicas = {ModelId(model.name): model.num_replicas for model in models}

    async def wake(self, model_id: ModelId) -> bool:
        """Has Serve run the model's replicas; True if that ended its sleep. Raises Unavailable, Conflict."""
        return bool(
            await _asked(self._registry.wake_model.remote(self._app_name, model_id, self._num_replicas[model_id]))
        )

    async def sleep(self, model_id: ModelId) -> None:
        """Stops the replicas of a model that has nothing to do. Raises Conflict if it has, Unavailable."""
        await _asked(self._registry.sleep_model.remote(self._app_name, model_id))

    async def count_replicas(self) -> Mapping[str, int]:
        """Deployment → replicas that run or start. Raises Unavailable."""
        try:
            status = await asyncio.to_thread(serve.status)
        except (RayError, RayServeException) as error:
            raise Unavailable(f"Serve does not answer: {error}") from None
        application = status.applications.get(self._app_name)
        if application is None:
            raise Unavailable(f"Serve knows no application {self._app_name!r}")
        return {
            name: sum(count for state, count in deployment.replica_states.items() if str(state) != _STOPPING)
            for name, deployment in application.deployments.items()
        }


async def _asked(answer: Awaitable[Result]) -> Result:
    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, RemoraError):
            raise error.cause from None
        raise
    except RayError as error:
        raise Unavailable(f"the registry cannot be reached: {str(error).partition(chr(10))[0]}") from None
