"""The Serve application of a configuration: one deployment per model, and the router in front of them."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from remora.cache_actors.device_resources import actor_options, placement_strategy, process_resources
from remora.deployments.replica import ModelReplica
from remora.deployments.targeting import TargetedRequestRouter
from remora.platform.base.config import RemoraConfig
from remora.platform.base.model_config import ModelConfig
from remora.platform.base.serve_environment import require_loopback
from remora.platform.http.ingress import HttpRouter

#: Name of the router's deployment; models have lower-case names, so it cannot be one of theirs.
ROUTER_NAME = "Router"
#: Admission is the engine's and the router's affair; Serve must not add a second queue.
_MAX_ONGOING_REQUESTS = 100_000
#: Ray counts CPUs to place processes.
_PROCESS_CPUS = 0.01
#: For requests to leave a replica that stops; what is left then is continued elsewhere as after a crash.
_SHUTDOWN_TIMEOUT_S = 10.0


def start_serve(config: RemoraConfig) -> None:
    """Starts Serve on the Ray cluster of this process, listening where the configuration says.

    Raises ConfigError for an address that others can reach. The environment must have been set before
    (platform/base/serve_environment.py).
    """
    if not config.http.trusted_network and not config.tenants:
        require_loopback(config.http.host)
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=config.http.host, port=config.http.port),
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )


def build_app(config: RemoraConfig, *, drain_timeout_s: float = _SHUTDOWN_TIMEOUT_S) -> serve.Application:
    """The application, ready for `serve.run`. `drain_timeout_s`: how long a router that stops goes on with the streams
    it has, for they end with it."""
    models = {model.name: _model_deployment(config, model).bind(config, model.name) for model in config.models}
    router = serve.deployment(
        name=ROUTER_NAME,
        num_replicas=config.http.num_routers,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": _PROCESS_CPUS},
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        # Routers need no device: the new one is there before the old one goes.
        max_surge_percent=100,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )(serve.ingress()(HttpRouter))
    return router.bind(config, models)


def _model_deployment(config: RemoraConfig, model: ModelConfig) -> Any:
    devices = {device.name: device for device in config.devices}
    placement: dict[str, Any] = {}
    if model.pipeline_stages > 1:
        # A bundle for each stage: the replica is in the first, and starts its workers in the others.
        placement = {
            "placement_group_bundles": [process_resources([devices[name]]) for name in model.stage_devices],
            "placement_group_strategy": placement_strategy(devices[name] for name in model.stage_devices),
        }
    return serve.deployment(
        name=model.name,
        num_replicas=model.num_replicas,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options=actor_options(process_resources(devices[name] for name in model.first_devices)),
        **placement,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        # A model that cannot be loaded will not load at the twentieth attempt either.
        max_constructor_retry_count=2,
        request_router_config=RequestRouterConfig(request_router_class=TargetedRequestRouter),
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )(ModelReplica)
