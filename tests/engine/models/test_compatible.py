"""Models whose KV another one may use: known from files, measured, and refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from model_support import byte_tokenizer, save_tiny

from remora.deployments.accuracy.gate import VerdictStore, check_compatible_gate
from remora.deployments.accuracy.measure import measure_adopted
from remora.deployments.models.compatible import compatible_identities
from remora.deployments.models.load import load_model, read_kv_identity
from remora.deployments.models.loaded_model import LoadedModel
from remora.platform.base.config import parse_config
from remora.platform.base.errors import InvalidRequest, ModelError
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.main import remora

TEXT = "A remora travels with a ray, and a ray travels with the current. " * 8


def load(folder: Path, **settings: Any) -> LoadedModel:
    model = ModelConfig(name="m", source=str(folder), **{"weights": "fp32", "kv_precision": "fp32", **settings})
    return load_model(model, block_tokens=16, num_threads=1)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "base", "llama")
    return tmp_path / "base"


def test_what_a_models_kv_is_shows_without_its_weights_in_memory(base: Path) -> None:
    model = ModelConfig(name="m", source=str(base), weights="int8")
    loaded = load_model(model, block_tokens=16, num_threads=1)
    identity = read_kv_identity(model, block_tokens=16)
    assert identity == loaded.kv_identity
    assert identity.fingerprint(("bf16", "bf16")) == loaded.fingerprint
    other = read_kv_identity(model.model_copy(update={"weights": "bf16"}), block_tokens=16)
    assert other.fingerprint(("bf16", "bf16")) != loaded.fingerprint
    foreign = model.model_copy(update={"backend": "transformers"})
    with pytest.raises(ModelError, match="no other model can use its KV"):
        read_kv_identity(foreign, block_tokens=16)


def test_kv_of_the_same_model_costs_nothing_and_that_of_others_the_more_the_farther_they_are(
    base: Path, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "stranger", "llama", seed=1)
    same = measure_adopted(lambda: load(base), lambda: load(base), TEXT)
    assert (same.kl_divergence, same.top1_agreement, same.perplexity_change) == (0.0, 1.0, 0.0)
    assert same.num_tokens == len(TEXT) - 256, "the first step has nothing before it"
    near = measure_adopted(lambda: load(base, weights="int8"), lambda: load(base), TEXT)
    far = measure_adopted(lambda: load(tmp_path / "stranger"), lambda: load(base), TEXT)
    assert 0 < near.kl_divergence < 0.01 < far.kl_divergence
    assert near.top1_agreement > far.top1_agreement
    with pytest.raises(InvalidRequest, match="more than 256"):
        measure_adopted(lambda: load(base), lambda: load(base), TEXT[:200])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": 2}, "KV of another shape: 2 layers"),
        ({"rope_theta": 5000.0}, "KV of another shape"),
        ({"tokenizer": "more"}, "has another tokenizer"),
    ],
)
def test_models_that_are_declared_compatible_and_cannot_be_are_named(
    base: Path, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    folder, options = tmp_path / "other", dict(changes)
    tokenizer = options.pop("tokenizer", None)
    save_tiny(folder, "llama", **options)
    if tokenizer:
        more = byte_tokenizer()
        more.add_tokens(["remora"])
        more.save(str(folder / "tokenizer.json"))
    models = [
        {"name": "m", "source": str(base), "compatible_with": ["other"]},
        {"name": "other", "source": str(folder)},
    ]
    config = parse_config({"models": models})
    own = read_kv_identity(config.models[0], block_tokens=32)
    with pytest.raises(ModelError, match=rf"models\.m\.compatible_with: 'other' .*{expected}"):
        compatible_identities(config, config.models[0], own)


def test_the_command_measures_kv_of_another_model_and_its_verdict_is_the_gate(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path / "stranger", "llama", seed=1)
    names = ["eight", "stranger"]
    models = [
        {"name": "m", "source": str(base), "compatible_with": names},
        {"name": "eight", "source": str(base), "weights": "int8"},
        {"name": "stranger", "source": str(tmp_path / "stranger")},
    ]
    file, state = tmp_path / "remora.yaml", tmp_path / "state"
    file.write_text(yaml.safe_dump({"models": models}))
    monkeypatch.setenv("REMORA_STATE_DIR", str(state))
    config = parse_config({"models": models})
    model = config.models[0]
    own = read_kv_identity(model, block_tokens=32)
    precision = own.geometry.kv_precision

    def check(number: int, **changes: Any) -> None:
        other = compatible_identities(config, model, own)[number]
        check_compatible_gate(model.model_copy(update=changes), own, [other], precision, state)

    check(0)
    assert "run `remora accuracy -m m --kv-of eight`" in caplog.text
    caplog.clear()
    told = ["accuracy", "--config", str(file), "-m", "m", "--kv-of"]
    passed = CliRunner().invoke(remora, [*told, "eight"])
    assert passed.exit_code == 0, passed.output
    assert "behind KV of    eight" in passed.output
    check(0)
    assert "never measured" not in caplog.text
    failed = CliRunner().invoke(remora, [*told, "stranger"])
    assert failed.exit_code == 1, failed.output
    with pytest.raises(ModelError, match=r"models\.m\.compatible_with: KV of 'stranger' failed .*force_compatible"):
        check(1)
    check(1, force_compatible=True)
    assert "that is forced" in caplog.text
    assert len(list((state / "accuracy").glob("*.json"))) == 2
    assert VerdictStore(state).load(own.fingerprint(precision)) is None, "its own precision was not measured"
