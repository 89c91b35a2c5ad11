"""One running platform of this process: Ray, pools, replicas, HTTP; started and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from remora.cache_actors.process_watch import process_identity
from remora.cache_actors.stale_files import remove_stale
from remora.namespaces.commands import ProcessIdentity
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import RemoraError
from remora.platform.base.local_ray import new_temp_dir, start_local_ray, stop_local_ray
from remora.platform.base.paths import SHARED_MEMORY_DIR
from remora.platform.cli.instance import InstanceRecord, InstanceStore, state_dir_of
from remora.platform.cli.processes import INSTANCE_VARIABLE
from remora.platform.cli.progress import size_text

logger = logging.getLogger(__name__)

APP_NAME = "remora"
_READY_TIMEOUT_S = 600.0
_STOP_STEP_TIMEOUT_S = 20.0
_POLL_S = 0.1

Say = Callable[[str], None]


class StartFailed(RemoraError):
    """The platform did not come up; the message holds the reason that Serve or a process gave."""

    code = "start_failed"


class LocalPlatform:
    """Starts everything in `start`, ends it in `stop`, also after a `start` that failed half-way."""

    def __init__(self, config: RemoraConfig, store: InstanceStore, owner: ProcessIdentity, say: Say) -> None:
        """`config.http.port` is the port that will be used; `owner` is the process that `remora down` tells to end."""
        self._config = config
        self._store = store
        self._owner = owner
        self._say = say
        self._state_dir = state_dir_of(config)
        self._record: InstanceRecord | None = None
        self._temp_dir: Path | None = None
        self._ray_started = False

    @property
    def url(self) -> str:
        host = self._config.http.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._config.http.port}"

    @property
    def owns_ray(self) -> bool:
        return self._config.cluster.ray_address == "local"

    def start(self, *, on_ray_started: Callable[[], None] = lambda: None) -> None:
        """Returns when the platform answers requests. Raises RemoraError with a sentence.

        `on_ray_started` is called once Ray has started, which installs signal handlers of its own.
        """
        instance_id = secrets.token_hex(8)
        os.environ[INSTANCE_VARIABLE] = instance_id
        if self.owns_ray:
            self._temp_dir = new_temp_dir()
        self._record = InstanceRecord(
            cluster_name=self._config.cluster.name,
            instance_id=instance_id,
            process=self._owner,
            platform=process_identity(),
            url=self.url,
            ray_temp_dir=str(self._temp_dir or ""),
        )
        self._store.write(self._record)
        self._start_ray()
        on_ray_started()
        from ray.exceptions import RayError

        try:
            if self.owns_ray:
                self._create_pools()
            self._deploy()
            self._await_ready()
        except RayError as error:
            # An actor's error is its traceback: what happened stands at the end.
            cause = str(error).strip().rpartition("\n")[2]
            raise StartFailed(f"Ray failed while the platform was starting: {cause}") from error
        self._settle_stale_files()
        self._set_status("ready")

    def watch(self, stop: threading.Event) -> bool:
        """Waits for `stop`; False if Ray ended by itself before."""
        while not stop.wait(1.0):
            if not _ray_lives():
                return False
        return True

    def stop(self) -> None:
        """Ends what `start` began, in order. What does not end is left to the supervisor. Never raises."""
        if self._record is None:
            return
        self._set_status("stopping")
        # Ray prints to both streams that actors die, which is what is wanted here.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if self._ray_started:
                self._within("Serve", self._stop_serve)
                self._within("the pools", self._stop_actors)
            if self._temp_dir is not None:
                self._within("Ray", lambda: stop_local_ray(self._temp_dir or Path()))

    # ---- start -------------------------------------------------------------------------------------------------------

    def _start_ray(self) -> None:
        started_s = time.monotonic()
        self._ray_started = True
        if self._temp_dir is not None:
            start_local_ray(
                self._temp_dir,
                namespace=APP_NAME,
                num_cpus=os.cpu_count() or 1,
                object_store_bytes=int(self._config.cluster.object_store_bytes),
                # Its one node has all devices.
                resources={
                    device.node_resource: 1000.0 for device in self._config.devices if device.node_resource is not None
                },
            )
            self._say(f"Ray: a cluster of its own on loopback ({time.monotonic() - started_s:.1f} s)")
            return
        import ray

        address = self._config.cluster.ray_address
        try:
            ray.init(address=address, namespace=APP_NAME, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            self._ray_started = False
            raise StartFailed(f"cluster.ray_address: no Ray answers at {address!r}: {_first_line(error)}") from None
        self._say(f"Ray: joined {address} ({time.monotonic() - started_s:.1f} s)")

    def _deploy(self) -> None:
        from ray import serve

        from remora.platform.app import build_app, start_serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        start_serve(self._config)
        self._say("Serve: started")
        serve.run_many(
            [
                serve.RunTarget(
                    build_app(self._config),
                    name=APP_NAME,
                    route_prefix="/",
                    # Models with an idle_timeout_s are stopped and started by the registry.
                    external_scaler_enabled=True,
                )
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _await_ready(self) -> None:
        from ray import serve

        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        running: set[str] = set()
        while time.monotonic() < deadline_s:
            application = serve.status().applications.get(APP_NAME)
            if application is not None:
                for name, deployment in application.deployments.items():
                    if deployment.status.value == "HEALTHY" and name not in running:
                        running.add(name)
                        self._say(f"{name}: running")
                if application.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise StartFailed(_failure(application))
                if application.status.value == "RUNNING" and _answers(f"{self.url}/ready"):
                    return
            time.sleep(_POLL_S)
        raise StartFailed(f"the platform was not ready after {_READY_TIMEOUT_S:.0f} s; see `remora status`")

    def _create_pools(self) -> None:
        """On a Ray of its own the pools come first, so that an arena that does not fit is told at once."""
        import ray

        from remora.cache_actors.pool_calls import await_pool
        from remora.cache_actors.pool_handles import get_or_create_pool

        node_id = ray.get_runtime_context().get_node_id()
        for device in self._config.devices:
            pool = get_or_create_pool(self._config, device.name, node_id)
            binding = asyncio.run(await_pool(pool))
            self._say(f"pool {device.name}: {binding.outcome} {size_text(device.arena_bytes)} in {binding.arena_path}")

    def _settle_stale_files(self) -> None:
        """What no pool has adopted by now is of no use to anybody."""
        for path in remove_stale(self._config.cluster.name, SHARED_MEMORY_DIR, self._state_dir):
            self._say(f"removed {path}, which no pool of this configuration can use")

    # ---- stop --------------------------------------------------------------------------------------------------------

    def _stop_serve(self) -> None:
        from ray import serve

        if self.owns_ray:
            serve.shutdown()
        else:
            serve.delete(APP_NAME)

    def _stop_actors(self) -> None:
        import ray

        from remora.cache_actors.cluster_names import REGISTRY_NAME, ray_namespace
        from remora.cache_actors.pool_handles import find_pools

        pools = find_pools(self._config.cluster.name)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get([pool.retire.remote() for pool in pools], timeout=5)
        with contextlib.suppress(ValueError):  # it was never started
            pools.append(ray.get_actor(REGISTRY_NAME, namespace=ray_namespace(self._config.cluster.name)))
        for actor in pools:
            ray.kill(actor)

    def _within(self, what: str, action: Callable[[], None]) -> None:
        """Runs a step of the end; a step that hangs or fails does not keep the others from happening."""

        def run() -> None:
            try:
                action()
            except Exception:
                logger.exception("stopping %s failed", what)

        thread = threading.Thread(target=run, name=f"stop {what}", daemon=True)
        thread.start()
        thread.join(_STOP_STEP_TIMEOUT_S)
        if thread.is_alive():
            logger.warning("%s did not stop within %.0f s", what, _STOP_STEP_TIMEOUT_S)

    def _set_status(self, status: Literal["starting", "ready", "stopping"]) -> None:
        assert self._record is not None, "an instance that has begun to start has a record"
        self._record = msgspec.structs.replace(self._record, status=status)
        self._store.write(self._record)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _failure(application: Any) -> str:
    """What Serve knows about a failed application: the deployments' messages, which hold the exception."""
    messages = [
        f"{name}: {deployment.message.strip()}"
        for name, deployment in application.deployments.items()
        if deployment.message and deployment.status.value != "HEALTHY"
    ]
    return "\n".join(messages) or application.message or "Serve could not start the application"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _ray_lives() -> bool:
    import ray

    try:
        return len(ray.nodes()) > 0
    except Exception:  # whatever a broken connection to the GCS raises
        return False
