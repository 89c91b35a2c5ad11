"""The accuracy gate: what is measured, what is kept, and what is refused because of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from model_support import save_tiny
from numpy.typing import NDArray

from remora.deployments.accuracy.gate import ARITHMETIC, Bars, Verdict, VerdictStore, bars_of, check_gate, has_passed
from remora.deployments.accuracy.measure import Accuracy, measure, own_text, text_id
from remora.deployments.models.canonical_weights import CanonicalWeights
from remora.deployments.models.hf_config import decoder_spec, read_config
from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.safetensors_weights import SafetensorsSource
from remora.kernels.base import KVMemory
from remora.kernels.batch import StepBatch
from remora.kernels.grouped import GroupedTensor
from remora.platform.base.errors import InvalidRequest, ModelError
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.main import remora

TEXT = "A remora travels with a ray, and a ray travels with the current. " * 6


def load(folder: Path, **settings: Any) -> LoadedModel:
    model = ModelConfig(name="m", source=str(folder), **{"weights": "fp32", "kv_precision": "fp32", **settings})
    return load_model(model, block_tokens=16, num_threads=1)


class Sharpened:
    """A decoder whose logits are doubled: the same favourites, other probabilities."""

    name, batch_invariant = "sharpened", True

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def forward(self, batch: StepBatch, memory: KVMemory) -> NDArray[np.float32]:
        return 2 * self._decoder.forward(batch, memory)  # type: ignore[no-any-return]


def test_a_model_agrees_with_itself_in_everything(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    same = measure(lambda: load(tmp_path), lambda: load(tmp_path), TEXT)
    assert same.top1_agreement == 1.0
    assert same.kl_divergence == 0.0
    assert same.perplexity_change == 0.0
    assert same.num_tokens > 256, "more than one step"


def test_divergence_and_perplexity_are_those_of_the_definition(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")

    def sharpened() -> LoadedModel:
        loaded = load(tmp_path)
        object.__setattr__(loaded, "decoder", Sharpened(loaded.decoder))
        return loaded

    result = measure(lambda: load(tmp_path), sharpened, TEXT)
    model = load(tmp_path)
    token_ids = np.asarray(model.tokenizer.encode(TEXT), np.int32)
    num_blocks = -(-len(token_ids) // 16)
    batch = StepBatch(max_tokens=len(token_ids), max_sequences=1, max_blocks=num_blocks)
    batch.add(token_ids, first_position=0, blocks=list(range(num_blocks)), logits="all")

    class Memory:
        geometry = model.geometry
        data = np.zeros(num_blocks * model.geometry.block_bytes, np.uint8)

    p = model.decoder.forward(batch, Memory()).astype(np.float64)
    q = 2 * p
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    next_ids = token_ids[1:]
    rows = np.arange(len(next_ids))
    assert result.kl_divergence == pytest.approx((np.exp(p) * (p - q)).sum(axis=1).mean(), rel=1e-4)
    assert result.reference_perplexity == pytest.approx(math.exp(-p[rows, next_ids].mean()), rel=1e-4)
    assert result.perplexity == pytest.approx(math.exp(-q[rows, next_ids].mean()), rel=1e-4)
    assert result.top1_agreement == 1.0


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(InvalidRequest, match="at least 64"):
        measure(lambda: load(tmp_path), lambda: load(tmp_path), "short")


def test_the_text_that_ships_with_the_package_is_a_few_thousand_characters() -> None:
    assert 5_000 < len(own_text()) < 20_000
    assert text_id(own_text()) != text_id(own_text() + " ")


def test_bars_are_those_of_the_coarser_precision_and_nan_passes_none() -> None:
    assert bars_of("bf16", "int8", "int8").max_perplexity_change == pytest.approx(0.005)
    assert (
        bars_of("bf16", "int8", "int4").max_perplexity_change == bars_of("bf16", "int4", "int4").max_perplexity_change
    )
    assert bars_of("int8", "bf16", "bf16").min_top1_agreement == 0.98
    bars = Bars(max_perplexity_change=0.01, min_top1_agreement=0.9)

    def measured(perplexity: float, agreement: float = 0.95) -> Accuracy:
        return Accuracy(
            num_tokens=100,
            reference_perplexity=10.0,
            perplexity=perplexity,
            kl_divergence=0.0,
            top1_agreement=agreement,
        )

    assert has_passed(measured(10.09), bars)
    assert not has_passed(measured(10.11), bars)
    assert not has_passed(measured(10.0, 0.89), bars)
    assert not has_passed(measured(math.nan), bars)


def verdict(*, passed: bool) -> Verdict:
    return Verdict(
        arithmetic=ARITHMETIC,
        model="m",
        weights="bf16",
        k_precision="int4",
        v_precision="int4",
        reference="itself",
        text="t",
        num_tokens=100,
        reference_perplexity=10.0,
        perplexity=10.5,
        kl_divergence=0.1,
        top1_agreement=0.8,
        bars=bars_of("bf16", "int4", "int4"),
        has_passed=passed,
        decoder="d",
    )


def test_a_precision_that_failed_is_refused_unless_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, state = tmp_path / "model", tmp_path / "state"
    folder.mkdir()
    save_tiny(folder, "llama")
    both: dict[str, Any] = {"kv_precision": {"k": "int4", "v": "int4"}}
    loaded = load(folder, weights="bf16", **both)
    model = ModelConfig(name="m", source=str(folder), **both)
    check_gate(model, loaded.geometry, loaded.fingerprint, state)
    assert "never measured" in caplog.text
    store = VerdictStore(state)
    store.save(loaded.fingerprint, verdict(passed=False))
    with pytest.raises(ModelError, match=r"models\.m: .*K int4.*\+5\.00%.*force_precision"):
        check_gate(model, loaded.geometry, loaded.fingerprint, state)
    with pytest.raises(ModelError, match=r"namespaces\.chat \(model m\): .*force_precision: true for model m"):
        check_gate(model, loaded.geometry, loaded.fingerprint, state, namespace="chat")
    check_gate(model.model_copy(update={"force_precision": True}), loaded.geometry, loaded.fingerprint, state)
    assert "it is used because that is forced" in caplog.text
    store.save(loaded.fingerprint, verdict(passed=True))
    check_gate(model, loaded.geometry, loaded.fingerprint, state)
    file = store.path(loaded.fingerprint)
    file.write_text(file.read_text().replace(f'"arithmetic": {ARITHMETIC}', '"arithmetic": 1'))
    assert store.load(loaded.fingerprint) is None, "kernels that rounded otherwise were measured"
    file.write_text("{")
    assert store.load(loaded.fingerprint) is None
    other = load(folder, kv_precision="int8", weights="bf16")
    assert store.load(other.fingerprint) is None, "another precision is another model"
    assert other.in_precision(("int4", "int4")) == (loaded.geometry, loaded.fingerprint), "whoever serves it"


def test_the_command_prints_the_figures_and_keeps_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, state = tmp_path / "model", tmp_path / "state"
    folder.mkdir()
    save_tiny(folder, "llama")
    monkeypatch.setenv("REMORA_STATE_DIR", str(state))
    result = CliRunner().invoke(remora, ["accuracy", "-m", str(folder), "--kv", "int8/bf16"])
    assert result.exit_code == 0, result.output
    for word in ("K int8, V bf16", "perplexity", "KL divergence", "top-1 agreement", "passed"):
        assert word in result.output
    [path] = (state / "accuracy").glob("*.json")
    kept = json.loads(path.read_text())
    assert (kept["k_precision"], kept["v_precision"], kept["has_passed"]) == ("int8", "bf16", True)
    loaded = load_model(
        ModelConfig(name="m", source=str(folder), kv_precision={"k": "int8"}),  # type: ignore[arg-type]
        block_tokens=32,
        num_threads=1,
    )
    assert path.stem == loaded.fingerprint.hex()
    refused = CliRunner().invoke(remora, ["accuracy", "-m", str(folder), "--kv", "int3"])
    assert refused.exit_code != 0
    assert "--kv" in str(refused.exception)


def test_weights_that_are_quantised_here_have_the_bits_asked_for_and_a_head_of_eight(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = read_config(tmp_path, trust_remote_code=False)
    spec = decoder_spec("m", config, weights="int4", max_model_len=64)
    weights = CanonicalWeights(spec, SafetensorsSource(tmp_path))
    assert weights.num_exact() == 0
    for name, precision in [("lm_head", "int8"), ("layers.0.qkv", "int4"), ("layers.1.down", "int4")]:
        weight = weights[name]
        assert isinstance(weight, GroupedTensor)
        assert weight.precision == precision
