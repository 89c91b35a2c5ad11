"""What does not fit is found before anything is started."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest

from remora.kernels.base import DecoderShape
from remora.platform.base.config import HttpConfig, RemoraConfig, parse_config
from remora.platform.base.errors import ConfigError
from remora.platform.cli import start_checks
from remora.platform.cli.start_checks import (
    ModelPlan,
    check_database,
    check_memory,
    check_sizes,
    choose_port,
    weights_bytes,
)

MiB = 1024 * 1024


def config_with(**device: object) -> RemoraConfig:
    return parse_config({"devices": [device], "models": [{"name": "a", "source": "x", "num_replicas": 2}]})


def plan(*, block_bytes: int = MiB, weights: int = 100 * MiB) -> ModelPlan:
    return ModelPlan(
        name="a", source="x", architecture="llama", weights_bytes=weights, block_bytes=block_bytes, max_model_len=512
    )


def test_an_extent_of_fewer_than_eight_blocks_is_refused_with_the_smallest_allowed() -> None:
    config = config_with(arena_bytes="64MiB", extent_bytes="4MiB")
    check_sizes(config, [plan(block_bytes=MiB // 2)])
    with pytest.raises(
        ConfigError, match=r"devices\.cpu0\.extent_bytes: 4194304 .* hold 7 blocks of model 'a'"
    ) as caught:
        check_sizes(config, [plan(block_bytes=MiB // 2 + 64)])
    smallest = int(str(caught.value).rpartition(": ")[2].split()[0])
    assert smallest % 4096 == 0
    check_sizes(config_with(arena_bytes="64MiB", extent_bytes=smallest), [plan(block_bytes=MiB // 2 + 64)])


def test_blocks_count_in_the_widest_precision_that_a_namespace_has(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"int8": 100, "bf16": 200, "fp32": 400}

    def geometry(*, block_tokens: int, kv_precisions: tuple[str, str]) -> SimpleNamespace:
        return SimpleNamespace(block_bytes=sizes[kv_precisions[0]])

    spec = SimpleNamespace(architecture="llama", shape=None, max_model_len=64, geometry=geometry)
    monkeypatch.setattr(start_checks, "resolve_source", lambda model: SimpleNamespace(path="x"))
    monkeypatch.setattr(start_checks, "_read_spec", lambda model, files: spec)
    monkeypatch.setattr(start_checks, "weights_bytes", lambda shape: 0)
    for precisions, expected in (((), 200), (("int8",), 200), (("int8", "fp32"), 400)):
        namespaces = [{"name": f"n{i}", "model": "a", "kv_precision": each} for i, each in enumerate(precisions)]
        config = parse_config({"models": [{"name": "a", "source": "x"}], "namespaces": namespaces})
        assert [each.block_bytes for each in start_checks.plan_models(config, lambda line: None)] == [expected]


def test_a_model_larger_than_memory_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "available_memory_bytes", lambda: 300 * MiB)
    config = config_with(arena_bytes="64MiB")
    check_memory(config, [plan(weights=100 * MiB)])
    with pytest.raises(ConfigError, match=r"models\.a\.source: its weights take 302 MiB .* 300 MiB of memory"):
        check_memory(config, [plan(weights=151 * MiB)])


def test_weights_and_arenas_together_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "available_memory_bytes", lambda: 250 * MiB)
    with pytest.raises(ConfigError, match="200 MiB of weights and 64 MiB of arenas do not fit 250 MiB"):
        check_memory(config_with(arena_bytes="64MiB"), [plan()])


def test_weights_of_smollm2_are_estimated_within_three_per_cent() -> None:
    shape = DecoderShape(
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        weights="bf16",
    )
    # 134.5 million parameters of two bytes, and the tied embedding once more as the head.
    assert weights_bytes(shape) == pytest.approx(2 * (134_515_008 + 49152 * 576), rel=0.03)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"http\.port: {port} on 127\.0\.0\.1 cannot be used"):
            choose_port(HttpConfig(port=port), None)
        assert choose_port(HttpConfig(port=port), 0) not in (0, port)


def test_a_database_without_a_driver_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    config = parse_config(
        {"cluster": {"database_url": "postgresql://a:secret@db/r"}, "models": [{"name": "a", "source": "x"}]}
    )
    with pytest.raises(ConfigError, match=r"cluster\.database_url: postgresql\+psycopg://a:\*\*\*@db/r needs"):
        check_database(config)
