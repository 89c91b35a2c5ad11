"""Tells Ray Serve how many replicas a deployment is to have, from outside of its configuration.

Serve's own autoscaler cannot do it: any call through a handle of a deployment without replicas, a health question as
well, counts for it as a request and starts one; and it does not see the requests that routers hold. The application
must have been deployed with `external_scaler_enabled: true`; a new configuration sets the numbers that are in it.
"""

from __future__ import annotations

import asyncio
from typing import Final

import ray
from ray.exceptions import RayError, RayTaskError

from remora.platform.base.errors import Conflict, Unavailable
from remora.platform.base.ids import ModelId

#: Longest wait for Serve's controller.
_TIMEOUT_S: Final = 5.0


async def scale_deployment(app_name: str, model_id: ModelId, num_replicas: int) -> None:
    """Returns when Serve's controller has taken it on record. Raises Conflict, Unavailable."""
    from ray.serve._private.common import DeploymentID
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
    from ray.serve._private.exceptions import ExternalScalerDisabledError

    try:
        # What Serve's own REST call (.../deployments/{name}/scale) does; the dashboard that has it does not run here.
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        deployment = DeploymentID(name=model_id, app_name=app_name)
        async with asyncio.timeout(_TIMEOUT_S):
            await controller.update_deployment_replicas.remote(deployment, num_replicas)
    except RayTaskError as error:
        if isinstance(error.cause, ExternalScalerDisabledError):
            raise Conflict(
                f"models.{model_id}.idle_timeout_s: Serve does not let replicas of the application {app_name!r} stop; "
                "say external_scaler_enabled: true in its Serve configuration."
            ) from None
        raise Unavailable(f"Serve: {_first_line(error.cause)}") from None
    except (RayError, ValueError, TimeoutError) as error:
        raise Unavailable(f"Serve does not answer: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
