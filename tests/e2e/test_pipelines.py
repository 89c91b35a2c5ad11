"""A model in two stages beside the same model unsplit: equal texts, also when a stage is
killed in the middle of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from remora.platform.base.config import parse_config

pytestmark = pytest.mark.e2e

CLUSTER = "e2e-stages"
PROMPTS = [
    "Rivers flow from the mountains to the sea and carry stones, sand and stories with them. " * 4,
    "One, two, three, four,",
    "The remora is a fish that",
]


@pytest.fixture
def split(platform: Any, tmp_path: Path) -> Iterator[httpx.Client]:
    from ray import serve
    from tests.e2e.conftest import await_unreferenced_stages, end_actors

    from remora.platform.app import build_app

    model = platform.config.models[0].model_dump(include={"name", "source", "max_model_len"})
    config = parse_config(
        {
            "cluster": {"name": CLUSTER, "state_dir": str(tmp_path), "debug": True},
            "http": {"port": platform.config.http.port},
            "devices": [
                {"name": name, "arena_bytes": "48MiB", "extent_bytes": "8MiB", "num_threads": 1}
                for name in ("half0", "half1")
            ],
            "models": [{**model, "pipeline_stages": 2, "stage_devices": ["half0", "half1"], "stage_layers": [16, 14]}],
        }
    )
    try:
        serve.run(build_app(config), name="stages", route_prefix="/stages", external_scaler_enabled=True)
        with httpx.Client(base_url=f"{platform.url}/stages", timeout=120) as client:
            platform.eventually(lambda: client.get("/ready").status_code == 200, 120, what="ready")
            yield client
            await_unreferenced_stages(platform, client)
    finally:
        serve.delete("stages")
        end_actors(CLUSTER)


def complete(client: httpx.Client, prompt: str, max_tokens: int = 120, *, model: str = "smollm2") -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def _stages(client: httpx.Client) -> list[dict[str, Any]]:
    (replica,) = client.get("/v1/replicas").json()["data"]
    return list(replica["pipeline"] or [])


def test_a_split_model_says_the_same_also_while_a_stage_is_killed(platform: Any, split: httpx.Client) -> None:
    expected = [complete(platform.http, prompt)["choices"][0]["text"] for prompt in PROMPTS]
    assert [complete(split, prompt)["choices"][0]["text"] for prompt in PROMPTS] == expected
    again = complete(split, PROMPTS[0])
    assert again["choices"][0]["text"] == expected[0]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32, "both stages have the prompt"

    before = _stages(split)
    assert [(each["state"], each["device"]) for each in before] == [("ready", "half0"), ("ready", "half1")]
    texts: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: texts.update({i: complete(split, PROMPTS[i], 120)["choices"][0]["text"]}))
        for i in range(len(PROMPTS))
    ]
    for thread in threads:
        thread.start()
    figures = platform.eventually(lambda: split.get("/v1/replicas").json()["data"][0]["stats"]["num_running"], 20)
    assert figures
    os.kill(before[1]["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(180)
    assert [texts.get(i) for i in range(len(PROMPTS))] == expected, "a killed stage costs nobody a token"
    after = platform.eventually(
        lambda: [each for each in _stages(split) if each["state"] == "ready" and each["num_restarts"]], 60
    )
    assert after[0]["pid"] != before[1]["pid"]
    assert _stages(split)[0]["pid"] == before[0]["pid"], "the replica itself went on"
