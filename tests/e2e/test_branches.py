"""A session forked several ways at once, on real replicas: one prefix, answers of their own, sessions that go on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e.test_sessions import LONG, call, log_of, text_of, turn

pytestmark = pytest.mark.e2e


def test_branches_compute_their_common_prompt_once_and_go_on_as_sessions(platform: Any) -> None:
    parent = call(platform, "/v1/sessions", {"model": "smollm2"})["id"]
    branches = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0, "keep": False}]
    body = {"messages": [{"role": "user", "content": f"Of branches: {LONG}"}], "max_tokens": 16, "branches": branches}
    kept: list[str] = []
    try:
        document = call(platform, f"/v1/sessions/{parent}/fork", body)
        kept = [each["session_id"] for each in document["branches"] if each["session_id"]]
        texts = [choice["message"]["content"] for choice in document["choices"]]
        assert texts[0] == texts[2] != texts[1]
        for each in document["branches"]:
            usage = each["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 32 * 32 - 32 > 64
        logs = [log_of(platform, name) for name in kept]
        num_prompt = document["branches"][0]["usage"]["prompt_tokens"]
        assert logs[0][:num_prompt] == logs[1][:num_prompt]
        assert logs[0] != logs[1]
        assert log_of(platform, parent) == []
        second = turn(platform, kept[1], "And then?", max_tokens=4)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(logs[1]) // 32 * 32 - 32
        # The same greedy answer without branches.
        assert text_of(turn(platform, parent, body["messages"][0]["content"], max_tokens=16)) == texts[0]
    finally:
        for name in (parent, *kept):
            platform.http.delete(f"/v1/sessions/{name}")
