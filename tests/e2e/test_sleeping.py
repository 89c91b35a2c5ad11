"""A model whose replicas are stopped, on real Serve: its cache stays, and however many ask, it is started once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

MODEL = "smollm2-int8"
PROMPT = "The remora travels with a ray and changes its host without letting go. " * 4


def _state(platform: Any) -> str:
    return str(platform.get(f"/v1/models/{MODEL}")["state"])


def _models_with_leases(platform: Any) -> set[str]:
    return {lease["model"] for lease in platform.pool()["leases"]}


def _wakes(platform: Any) -> float:
    lines = platform.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("remora_model_wakes_total{"))


def test_a_sleeping_model_keeps_its_cache_and_is_woken_once_by_all_who_ask(platform: Any) -> None:
    before = platform.chat(PROMPT, model=MODEL, max_tokens=4).json()
    (old,) = platform.replicas(MODEL)
    num_wakes = _wakes(platform)
    # The registry hears once a second that the chat is over.
    path = f"/v1/models/{MODEL}/sleep"
    platform.eventually(lambda: platform.http.post(path, json={}).status_code == 200, 20, what="it is told to sleep")
    platform.eventually(lambda: _state(platform) == "asleep", 15, what="the model sleeps")
    platform.eventually(lambda: not platform.replicas(MODEL), 20, what="its replica is gone")
    assert platform.http.get("/ready").status_code == 200
    platform.eventually(lambda: MODEL not in _models_with_leases(platform), 10, what="its lease is given back")

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: platform.chat(PROMPT, model=MODEL, max_tokens=4), range(6)))
    assert [each.status_code for each in answers] == [200] * 6
    assert {each.json()["choices"][0]["message"]["content"] for each in answers} == {
        before["choices"][0]["message"]["content"]
    }
    assert all(each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers)
    (new,) = platform.replicas(MODEL)
    assert new["id"] != old["id"]
    assert _wakes(platform) == num_wakes + 1
    for each in answers:
        path = f"/v1/traces/{each.headers['x-remora-trace-id']}"
        spans = platform.eventually(lambda path=path: _spans_of_ended(platform, path), 10, what="the whole trace")
        assert "model.wake" in spans


def _spans_of_ended(platform: Any, path: str) -> set[str]:
    response = platform.http.get(path)
    names = {each["name"] for each in response.json()["spans"]} if response.status_code == 200 else set()
    return names if f"chat {MODEL}" in names and "engine.decode" in names else set()
