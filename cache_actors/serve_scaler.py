"""Tells Ray Serve how many replicas a deployment is to have, from outside of its configuration.

Serve's own autoscaler cannot do it: any call through a handle of a deployment without replicas, a health question as
well, counts for it as a request and starts one; and it does not see the requests that routers hold. The application
must have been deployed with `external_scaler_enabled: true`; a new configuration sets the numbers that are in it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import ray
from ray.exceptions import RayError, RayTaskError

from remora.platform.base.errors import Conflict, Unavailable
from remora.platform.base.ids import ModelId

#: Longest wait for Serve's controller.
_TIMEOUT_S: Final = 5.0


class ServeScaler:
    """A Scaler (model_sleep.py) on Serve's controller."""

    async def wanted(self, app_name: str, model_id: ModelId) -> int:
        """Raises Unavailable, also when Serve does not know the model (any more, or yet)."""
        details = await _ask_controller("get_serve_instance_details")
        try:
            deployments = details["applications"][app_name]["deployments"]
            return int(deployments[model_id]["target_num_replicas"])
        except KeyError as missing:
            raise Unavailable(f"Serve knows no {missing}") from None

    async def scale(self, app_name: str, model_id: ModelId, num_replicas: int) -> None:
        """Returns when Serve has taken it on record. Raises Conflict, Unavailable."""
        from ray.serve._private.common import DeploymentID

        # What Serve's own REST call (.../deployments/{name}/scale) does; its dashboard does not run everywhere.
        await _ask_controller(
            "update_deployment_replicas", DeploymentID(name=model_id, app_name=app_name), num_replicas
        )


async def _ask_controller(method: str, *arguments: Any) -> Any:
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
    from ray.serve._private.exceptions import ExternalScalerDisabledError

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        async with asyncio.timeout(_TIMEOUT_S):
            return await getattr(controller, method).remote(*arguments)
    except RayTaskError as error:
        if isinstance(error.cause, ExternalScalerDisabledError):
            raise Conflict(
                "Serve does not let a model's replicas stop: say external_scaler_enabled: true for the application in "
                "the Serve configuration."
            ) from None
        raise Unavailable(f"Serve: {_first_line(error.cause)}") from None
    except (RayError, ValueError, TimeoutError) as error:
        raise Unavailable(f"Serve does not answer: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
