"""A Ray of our own on this machine: free ports, loopback only, whatever RAY_ADDRESS or other cluster there is."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from remora.platform.base.errors import RemoraError
from remora.platform.base.ports import free_ports
from remora.platform.base.serve_environment import serve_environment

logger = logging.getLogger(__name__)

#: Ray puts unix sockets below its folder, whose paths may have 107 characters; its own part needs up to 64.
MAX_TEMP_DIR_CHARS = 40
#: Every Remora's Ray has its own folder; its name starts so.
TEMP_DIR_PREFIX = f"remora-{os.getuid()}-"


class RayStartError(RemoraError):
    """Ray did not start; the message says where its logs are."""

    code = "ray_start_failed"


def local_ray_environment(temp_dir: Path) -> dict[str, str]:
    """Variables that must be set before `ray` is imported, in the driver; its processes inherit them."""
    http_port, grpc_port = free_ports(2)
    return {
        # 2.60 writes a token into the home directory otherwise; the ports are on loopback.
        "RAY_AUTH_MODE": "disabled",
        # Without it sockets bind to all interfaces although the node's address is 127.0.0.1.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        # Nobody restarts its GCS: who has lost it need not wait the default minute for it.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Events of tasks are for Ray's dashboard, which is not started.
        "RAY_task_events_report_interval_ms": "0",
        # Nobody reads Ray's own metrics here.
        "RAY_enable_metrics_collection": "0",
        # Nor how long the handlers of its event loops take.
        "RAY_event_stats": "0",
        # Serve's controller looks at everything ten times a second otherwise, for a thirtieth of a core.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # Fixed otherwise, so that a second instance on the machine would not start.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(http_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc_port),
        **serve_environment(temp_dir),
    }


def new_temp_dir() -> Path:
    """A private folder for Ray's sockets and logs with a path that is short enough for unix sockets."""
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        if len(str(parent)) + len(TEMP_DIR_PREFIX) + 9 <= MAX_TEMP_DIR_CHARS:
            return Path(tempfile.mkdtemp(prefix=TEMP_DIR_PREFIX, dir=parent))
    raise RayStartError(f"no folder with a path short enough for Ray's sockets: {tempfile.gettempdir()}")


def start_local_ray(
    temp_dir: Path,
    *,
    namespace: str,
    num_cpus: int,
    object_store_bytes: int,
    resources: Mapping[str, float] | None = None,
) -> None:
    """Starts Ray and connects this process to it; tries twice, because Ray gives up after 30 s on a busy machine.

    Its one node offers `resources` beside CPUs and GPUs. Sets `local_ray_environment()` in this process. Raises
    RayStartError.
    """
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(local_ray_environment(temp_dir))
    import ray

    def start() -> None:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=None,
            resources=dict(resources or {}),
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(temp_dir),
        )

    try:
        with _no_ray_arguments():
            start()
    except Exception as first:
        logger.warning("Ray did not start, trying once more: %s", str(first).partition("\n")[0])
        ray.shutdown()
        try:
            start()
        except Exception as error:
            ray.shutdown()
            raise RayStartError(
                f"Ray did not start: {str(error).partition(chr(10))[0]} Its logs are in {temp_dir}/session_latest/logs."
            ) from error


def stop_local_ray(temp_dir: Path, *, keep_logs: bool = False) -> None:
    """Stops the Ray that this process started and removes its folder."""
    import ray

    ray.shutdown()
    if not keep_logs:
        shutil.rmtree(temp_dir, ignore_errors=True)


@contextlib.contextmanager
def _no_ray_arguments() -> Iterator[None]:
    """Ray prints its start line to standard error through logging and to standard output through its own printer."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
