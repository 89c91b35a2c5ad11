"""What the chart renders runs: on a Ray started as KubeRay starts it, with its environment and token, from its Serve
configuration, asked by its test script; and a changed configuration is taken in place.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from remora.cache_actors.stale_files import remove_stale
from remora.platform.base import paths
from remora.platform.base.local_ray import new_temp_dir, stop_local_ray
from remora.platform.base.ports import free_ports
from remora.platform.cli.processes import kill_marked

helm_python = pytest.importorskip("helm_python", reason="needs helm-python-sdk, which exists for x86-64 only")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CHART_DIR = Path(__file__).resolve().parents[3] / "helm"
CLUSTER_NAME = "chart"
#: Names the processes of this Ray in their environment.
_MARK = "REMORA_TEST_CHART"
VALUES: dict[str, Any] = {
    "config": {
        "cluster": {"name": CLUSTER_NAME, "object_store_bytes": "128MiB"},
        "http": {"num_routers": 2},
        "devices": [{"name": "cpu0", "arena_bytes": "64MiB", "extent_bytes": "16MiB"}],
    },
    "workers": [
        {
            "name": "cpu",
            "devices": ["cpu0"],
            "replicas": 1,
            "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}},
        }
    ],
}


class ChartOnRay:
    """One node that is head and worker at once, on loopback; everything else is as rendered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temp_dir = new_temp_dir()
        self._ray: subprocess.Popen[bytes] | None = None
        self._config_path = folder / "remora.yaml"
        self._token = secrets.token_hex(16)
        self.state_dir = folder / "state"
        self._gcs_port, self._dashboard_port, self._agent_port, self._client_port, self._http_port = free_ports(5)
        self.url = f"http://127.0.0.1:{self._http_port}"

    def start(self) -> None:
        service = self._render(VALUES)
        cluster = service["rayClusterConfig"]
        (group,) = cluster["workerGroupSpecs"]
        spec = group["template"]["spec"]
        environment = os.environ | {
            each["name"]: each["value"].replace("/tmp/remora", str(self._temp_dir))
            for each in spec["containers"][0]["env"]
            if "value" in each and each["name"] not in ("HOME", "TMPDIR", "HF_HOME")
        }
        # What KubeRay adds for authOptions.mode: token, and what keeps this Ray on loopback.
        assert cluster["authOptions"] == {"mode": "token"}
        environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "REMORA_STATE_DIR": str(self.state_dir),
            _MARK: self._token,
        }
        (files,) = spec["initContainers"]
        _, *arguments = files["command"]
        script = [each.replace("/tmp/remora", str(self._temp_dir)) for each in arguments]
        assert "env" not in files, "with Ray's variables it would not find the real HAProxy"
        subprocess.run([sys.executable, *script], check=True, timeout=120)
        # KubeRay writes parameters into a line for a shell.
        (resources,) = shlex.split(group["rayStartParams"]["resources"])
        self._ray = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"),
                *("--node-ip-address=127.0.0.1", f"--port={self._gcs_port}", f"--temp-dir={self._temp_dir}"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard_port}"),
                *(f"--dashboard-agent-listen-port={self._agent_port}", f"--ray-client-server-port={self._client_port}"),
                f"--object-store-memory={group['rayStartParams']['object-store-memory']}",
                f"--resources={resources}",
            ],
            env=environment,
            stdout=(self._folder / "ray.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        probe = spec["containers"][0]["livenessProbe"]["httpGet"]["path"]
        self.await_answer(f"http://127.0.0.1:{self._agent_port}{probe}")

    def deploy(self, values: dict[str, Any]) -> None:
        """Hands the Serve configuration over, as KubeRay does; the mounted file follows a moment later."""
        service = self._render(values)
        serve = yaml.safe_load(service["serveConfigV2"])
        serve["http_options"] = {"host": "127.0.0.1", "port": self._http_port}
        serve["applications"][0]["args"]["config"] = str(self._config_path)
        self.dashboard("PUT", serve)
        time.sleep(1)
        self._config_path.write_text(self._document)

    def await_running(self) -> None:
        deadline_s = time.monotonic() + 240
        while True:
            application = self.dashboard("GET")["applications"].get("remora", {"status": "NOT_STARTED"})
            if application["status"] == "RUNNING":
                return
            assert application["status"] not in ("DEPLOY_FAILED", "UNHEALTHY"), application
            assert time.monotonic() < deadline_s, application
            time.sleep(0.5)

    def dashboard(self, method: str, body: object = None, *, token: str | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._dashboard_port}/api/serve/applications/",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {token or self._token}"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text else None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.loads(response.read())

    def await_answer(self, url: str) -> None:
        deadline_s = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline_s, (self._folder / "ray.log").read_text()[-2000:]
                assert self._ray is not None
                assert self._ray.poll() is None, (self._folder / "ray.log").read_text()[-2000:]
                time.sleep(0.5)

    def stop(self) -> None:
        if self._ray is not None:
            kill_marked(_MARK, self._token)  # an orderly end takes Ray half a minute
            self._ray.wait(60)
        stop_local_ray(self._temp_dir)
        remove_stale(CLUSTER_NAME, paths.SHARED_MEMORY_DIR, self.state_dir)

    def _render(self, values: dict[str, Any]) -> dict[str, Any]:
        with helm_python.Chart.load(CHART_DIR) as chart:
            texts = chart.render(values, name="demo", namespace="models")
        config_map = yaml.safe_load(texts["remora/templates/configmap.yaml"])
        self._document: str = config_map["data"]["remora.yaml"]
        spec: dict[str, Any] = yaml.safe_load(texts["remora/templates/rayservice.yaml"])["spec"]
        return spec


@pytest.fixture(scope="module")
def chart_on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartOnRay]:
    cluster = ChartOnRay(tmp_path_factory.mktemp("chart"))
    try:
        cluster.start()
        cluster.deploy(VALUES)
        cluster.await_running()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def chat(chart_on_ray: ChartOnRay) -> Callable[..., str]:
    """Runs the script of `helm test`."""

    def run(*models: str) -> str:
        done = subprocess.run(
            [sys.executable, str(CHART_DIR / "files" / "chat_test.py"), chart_on_ray.url, "60", *models],
            capture_output=True,
            text=True,
            timeout=180,
        )
        return done.stdout + done.stderr

    return run


def test_the_rendered_application_answers(chart_on_ray: ChartOnRay, chat: Callable[..., str]) -> None:
    assert chat("smollm2").startswith("smollm2: ")
    assert chart_on_ray.get("/v1/pools")["data"][0]["kind"] == "cpu"
    for path in ("/health", "/ready"):
        chart_on_ray.await_answer(chart_on_ray.url + path)


def test_the_script_of_helm_test_fails_for_a_model_that_is_not_there(chat: Callable[..., str]) -> None:
    assert "404" in chat("nobody")


def test_rays_ports_ask_for_the_token(chart_on_ray: ChartOnRay) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        chart_on_ray.dashboard("GET", token="wrong")
    assert caught.value.code in (401, 403)


class Streams:
    """Clients that stream one answer after the other, each the continuation of its own prompt, until told to stop."""

    NUM_CLIENTS = 2
    #: So long that some are under way whenever a replica or a router goes.
    NUM_TOKENS = 64

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(self.NUM_CLIENTS)]
        #: Text and usage of every answer, by client.
        self.answers: list[list[tuple[str, dict[str, Any]]]] = [[] for _ in self._threads]
        self.failures: list[str] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        deadline_s = time.monotonic() + 120
        while min(map(len, self.answers)) < 2 and not self.failures:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        try:
            while not self._stopped.is_set():
                self.answers[number].append(
                    self._ask(f"Story {number}. " + "Once a river met the sea and told it so. " * 20)
                )
        except Exception as error:
            self.failures.append(f"after {len(self.answers[number])} answers: {type(error).__name__}: {error}")

    def _ask(self, prompt: str) -> tuple[str, dict[str, Any]]:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": self.NUM_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        text, usage = "", None
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    document = json.loads(line[6:])
                    if "error" in document:
                        raise RuntimeError(document["error"]["message"])
                    text += "".join(choice["text"] for choice in document["choices"])
                    usage = document["usage"] or usage
        if usage is None:
            raise RuntimeError(f"cut off after {text!r}")
        return text, usage


def test_a_changed_configuration_is_taken_in_place_under_load_and_nobody_loses_anything(
    chart_on_ray: ChartOnRay, chat: Callable[..., str]
) -> None:
    streams = Streams(chart_on_ray.url)
    streams.start()
    num_before = [len(answers) for answers in streams.answers]
    try:
        take_new_quotas(chart_on_ray, chat)
    finally:
        streams.stop()
    assert streams.failures == []
    for answers, count in zip(streams.answers, num_before, strict=True):
        assert len(answers) >= count + 2
        assert len({text for text, _ in answers}) == 1, "as without the update"
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for _, usage in answers]
        # The first answer of all finds nothing.
        assert cached[1] > 150
        assert min(cached[2:]) >= 0.95 * cached[1], "at most 5 % of what was cached is computed again"


def take_new_quotas(chart_on_ray: ChartOnRay, chat: Callable[..., str]) -> None:
    """A new namespace and a new guarantee: all replicas and the router are replaced, and the pool lives on."""
    (before,) = chart_on_ray.get("/v1/pools")["data"]
    (replica,) = chart_on_ray.get("/v1/replicas")["data"]
    namespaces = [{"name": "smollm2", "model": "smollm2", "guaranteed": "16MiB"}, {"name": "b", "model": "smollm2"}]
    chart_on_ray.deploy(VALUES | {"config": VALUES["config"] | {"namespaces": namespaces}})
    deadline_s = time.monotonic() + 240
    while True:
        try:
            chart_on_ray.await_running()
            (now,) = chart_on_ray.get("/v1/replicas")["data"]
            if now["id"] != replica["id"] and now["connected"]:
                break
        except (urllib.error.URLError, ValueError):
            pass
        assert time.monotonic() < deadline_s
        time.sleep(0.5)
    assert chat("smollm2").startswith("smollm2: ")
    (after,) = chart_on_ray.get("/v1/pools")["data"]
    assert (after["id"], after["pid"]) == (before["id"], before["pid"])
    guaranteed = {each["namespace_id"]: each["guaranteed_bytes"] for each in after["namespaces"]}
    assert guaranteed == {"smollm2": 16 * 1024 * 1024, "b": 0}
