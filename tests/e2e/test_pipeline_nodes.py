"""Models in three and in two stages that share devices of two nodes, beside the same model unsplit: equal texts, also
when a stage or a node is killed in the middle of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests.cluster.nodes.extra_nodes import ExtraNodes
from tests.e2e.test_pipelines import PROMPTS, complete

from remora.platform.base.config import parse_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CLUSTER = "e2e-stage-nodes"
MODEL, NEIGHBOUR = "smollm2", "smollm2-neighbour"
#: Two stages on the first node and one on the other; the neighbour has its two on the first device and the last.
SPLIT = [11, 9, 10]
MODELS = (MODEL, NEIGHBOUR)
#: What the nodes offer: one for each stage there.
FIRST, OTHER = {"stage_first": 3}, {"stage_other": 2}


class Split(NamedTuple):
    http: httpx.Client
    nodes: ExtraNodes

    def stages(self) -> list[dict[str, Any]]:
        return list(self.replicas()[MODEL]["pipeline"] or [])

    def replicas(self) -> dict[str, dict[str, Any]]:
        """By their model."""
        return {each["model"]: each for each in self.http.get("/v1/replicas").json()["data"]}

    def states(self) -> list[str]:
        return [stage["state"] for each in self.replicas().values() for stage in each["pipeline"] or []]

    def num_running(self) -> int:
        return sum(each["stats"]["num_running"] for each in self.replicas().values())


@pytest.fixture
def split(platform: Any, tmp_path: Path) -> Iterator[Split]:
    from ray import serve
    from tests.e2e.conftest import await_unreferenced_stages, end_actors

    from remora.cache_actors.stale_files import remove_stale
    from remora.platform.app import build_app
    from remora.platform.base import paths

    model = platform.config.models[0].model_dump(include={"source", "max_model_len"})
    config = parse_config(
        {
            "cluster": {"name": CLUSTER, "state_dir": str(tmp_path), "debug": True},
            "http": {"port": platform.config.http.port},
            "devices": [
                {
                    "name": name,
                    "node_resource": resource,
                    "arena_bytes": "48MiB",
                    "extent_bytes": "8MiB",
                    "num_threads": 1,
                }
                for name, (resource,) in (("near0", FIRST), ("near1", FIRST), ("far", OTHER))
            ],
            "models": [
                {
                    **model,
                    "name": name,
                    "pipeline_stages": len(devices),
                    "stage_devices": devices,
                    "stage_layers": layers,
                }
                for name, devices, layers in (
                    (MODEL, ["near0", "near1", "far"], SPLIT),
                    (NEIGHBOUR, ["near0", "far"], [15, 15]),
                )
            ],
        }
    )
    nodes = ExtraNodes(tmp_path)
    try:
        serve.run_many(
            [
                serve.RunTarget(
                    build_app(config), name="stage-nodes", route_prefix="/stage-nodes", external_scaler_enabled=True
                )
            ],
            wait_for_ingress_deployment_creation=True,
            wait_for_applications_running=False,
        )
        with httpx.Client(base_url=f"{platform.url}/stage-nodes", timeout=120) as client:
            # The router is placed while no node is there that will be killed.
            platform.eventually(lambda: client.get("/health").status_code == 200, 60, what="the router answers")
            nodes.add(**FIRST)
            nodes.add(**OTHER)
            platform.eventually(lambda: client.get("/ready").status_code == 200, 120, what="ready")
            yield Split(client, nodes)
            await_unreferenced_stages(platform, client)
    finally:
        serve.delete("stage-nodes")
        try:
            end_actors(CLUSTER)
        finally:
            nodes.close()
            # What the killed node had in the shared memory of this machine.
            remove_stale(CLUSTER, paths.SHARED_MEMORY_DIR, tmp_path)


class Answers:
    """All prompts at once, every other one to the neighbour."""

    def __init__(self, client: httpx.Client) -> None:
        self._texts: dict[int, str] = {}
        self._client = client
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(len(PROMPTS))]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        self._texts[number] = complete(self._client, PROMPTS[number], model=MODELS[number % 2])["choices"][0]["text"]

    def texts(self) -> list[str | None]:
        for thread in self._threads:
            thread.join(120)
        return [self._texts.get(number) for number in range(len(PROMPTS))]


def test_stages_on_two_nodes_say_the_same_also_when_one_of_them_is_killed(platform: Any, split: Split) -> None:
    expected = [complete(platform.http, prompt)["choices"][0]["text"] for prompt in PROMPTS]
    for model in MODELS:
        assert [complete(split.http, prompt, model=model)["choices"][0]["text"] for prompt in PROMPTS] == expected
    again = complete(split.http, PROMPTS[0], 8)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32, "all three stages have the prompt"
    before = split.stages()
    first, other = before[0]["node"], before[2]["node"]
    assert [each["node"] for each in before] == [first, first, other]
    assert {first, other} == split.nodes.node_ids
    assert [each["num_layers"] for each in before] == SPLIT
    maps = Path(f"/proc/{before[0]['pid']}/maps").read_text()
    assert ("near1-" in maps, "far-" in maps) == (True, False), "nothing of another node's memory is mapped"

    answers = Answers(split.http)
    platform.eventually(lambda: split.num_running() == len(PROMPTS), 20, what="they run")
    os.kill(before[2]["pid"], signal.SIGKILL)
    assert answers.texts() == expected, "a killed stage costs nobody a token"
    platform.eventually(lambda: split.states() == ["ready"] * 5, 30, what="the stages are back")
    after = split.stages()
    assert [each["num_restarts"] for each in after] == [0, 1, 1]
    assert [each["node"] for each in after] == [first, first, other], "on the same nodes"
    assert after[0]["pid"] == before[0]["pid"], "the replica itself went on"

    answers = Answers(split.http)
    platform.eventually(lambda: split.num_running() == len(PROMPTS), 20, what="they run")
    split.nodes.kill(other)
    platform.eventually(lambda: split.states().count("waiting") == 2, 30, what="the states say that there is no node")
    new = split.nodes.add(**OTHER)
    assert answers.texts() == expected, "nor does a killed node"
    platform.eventually(lambda: split.states() == ["ready"] * 5, 30, what="the stages are back")
    assert [each["node"] for each in split.stages()] == [first, first, new]
    assert split.stages()[0]["pid"] == before[0]["pid"]
