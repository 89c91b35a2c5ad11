"""One local Ray cluster for the whole session: own ports, loopback only, whatever RAY_ADDRESS says."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A running Ray with 8 logical CPUs; named actors go into namespaces of the test's own."""
    saved = {name: os.environ.get(name) for name in (*_ENVIRONMENT, "RAY_ADDRESS")}
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(_ENVIRONMENT)
    import ray

    def start() -> None:
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=128 * 1024 * 1024,
            log_to_driver=False,
            namespace="remora-tests",
            _node_ip_address="127.0.0.1",
        )

    try:
        start()
    except Exception:  # Ray gives up after a fixed 30 s on a busy machine
        ray.shutdown()
        start()
    yield
    ray.shutdown()
    for name, value in saved.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
