"""`remora accuracy`: what a precision of KV or weights costs, measured against a reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from remora.deployments.accuracy.gate import ARITHMETIC, Verdict, VerdictStore, adopted_bars, bars_of, has_passed
from remora.deployments.accuracy.measure import Accuracy, measure, measure_adopted, own_text, text_id
from remora.deployments.models.compatible import check_compatible
from remora.deployments.models.load import load_model, read_kv_identity
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.source import resolve_source
from remora.platform.base.config import DeviceConfig, RemoraConfig, load_config, parse_config
from remora.platform.base.errors import ConfigError
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.instance import state_dir_of
from remora.platform.cli.main import EXIT_FAILED
from remora.platform.cli.ns import kv_words
from remora.platform.cli.up import DEFAULT_CONFIG

_WEIGHT_WORDS = ("bf16", "fp32", "int8", "int4")


@click.command()
@click.option(
    "-m", "--model", "model_name", required=True, help="A model of the configuration, or a source as in models.source."
)
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="Default: what `remora up` serves without a file."
)
@click.option("--kv", help="Precision of KV: a word, or K/V as in int8/int4. Default: the model's.")
@click.option("--weights", type=click.Choice(_WEIGHT_WORDS), help="Default: the model's.")
@click.option(
    "--kv-of", "kv_of", help="A model whose KV this one may use: measures going on behind it, against its own KV."
)
@click.option(
    "--text", "text_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure on this text and keep no verdict.",
)  # fmt: skip
def accuracy(
    model_name: str,
    config_file: Path | None,
    kv: str | None,
    weights: str | None,
    kv_of: str | None,
    text_file: Path | None,
) -> None:
    """Prints KL divergence, top-1 agreement and perplexity against bf16 weights and bf16 KV, and keeps the verdict.

    A model that failed is not served in that precision, unless its `force_precision` is set. With --kv-of: against the
    model's own KV, and what failed is not `compatible_with` it, unless `force_compatible` is set. Exit code 1: it
    failed.
    """
    config = load_config(config_file or DEFAULT_CONFIG)
    model = _model(config, model_name, kv, weights)
    device = next((device for device in config.devices if device.name == model.devices[0]), config.devices[0])
    text = own_text() if text_file is None else text_file.read_text(encoding="utf-8")
    k_precision, v_precision = model.kv_precisions
    key, decoder = b"", ""

    def load_measured() -> LoadedModel:
        nonlocal key, decoder
        loaded = _load(model, device)
        key, decoder = key or loaded.fingerprint, loaded.decoder.name
        return loaded

    if kv_of is None:
        plain = model.model_copy(update={"weights": "bf16", "kv_precision": "bf16"})
        bars, reference = bars_of(model.weights, k_precision, v_precision), _reference_words(model)
        result = measure(partial(_load, plain, device), load_measured, text)
    else:
        other = _model(config, kv_of, None, None).model_copy(update={"kv_precision": model.kv_precision})
        identities = [read_kv_identity(each, block_tokens=device.block_tokens) for each in (model, other)]
        check_compatible(*identities)
        key = b"".join(each.fingerprint(model.kv_precisions) for each in identities)
        bars, reference = adopted_bars(), f"{model.name} behind its own KV"
        result = measure_adopted(partial(_load, other, device), load_measured, text)
    verdict = Verdict(
        arithmetic=ARITHMETIC,
        model=model.name,
        weights=model.weights,
        k_precision=k_precision,
        v_precision=v_precision,
        reference=reference,
        text=text_id(text),
        num_tokens=result.num_tokens,
        reference_perplexity=result.reference_perplexity,
        perplexity=result.perplexity,
        kl_divergence=result.kl_divergence,
        top1_agreement=result.top1_agreement,
        bars=bars,
        has_passed=has_passed(result, bars),
        decoder=decoder,
        kv_of=kv_of or "",
    )
    _print(verdict, result)
    if text_file is None:
        click.echo(f"kept in {VerdictStore(state_dir_of(config)).save(key, verdict)}")
    if not verdict.has_passed:
        raise click.exceptions.Exit(EXIT_FAILED)


def _model(config: RemoraConfig, name: str, kv: str | None, weights: str | None) -> ModelConfig:
    found = next((model for model in config.models if model.name == name), None)
    data: dict[str, Any] = {"name": "measured", "source": name} if found is None else found.model_dump()
    if weights is not None:
        data["weights"] = weights
    if kv is not None:
        data["kv_precision"] = kv_words(kv)
    try:
        # On a device that is there whatever the file says: only precisions are new.
        return (
            parse_config({"models": [{**data, "device": "cpu0", "default_namespace": None, "compatible_with": ()}]})
            .models[0]
            .model_copy(update={"device": data.get("device", "cpu0")})
        )
    except ConfigError as error:
        raise ConfigError(f"--kv or --weights: {error}") from None


def _load(model: ModelConfig, device: DeviceConfig) -> LoadedModel:
    click.echo(
        f"reading with weights {model.weights}, K {model.kv_precisions[0]}, V {model.kv_precisions[1]}", err=True
    )
    return load_model(model, block_tokens=device.block_tokens, num_threads=device.num_threads)


def _reference_words(model: ModelConfig) -> str:
    """What stands for the truth. Files that hold integers know no better bf16 than their dequantised values."""
    path = resolve_source(model).path
    if path.suffix == ".gguf":
        return f"weights of {path.name} dequantised to bf16, bf16 KV"
    return f"weights of {path.name} in bf16, bf16 KV"


def _print(verdict: Verdict, result: Accuracy) -> None:
    click.echo(f"{verdict.model}: weights {verdict.weights}, K {verdict.k_precision}, V {verdict.v_precision}")
    if verdict.kv_of:
        click.echo(f"behind KV of    {verdict.kv_of}")
    click.echo(f"reference       {verdict.reference}")
    click.echo(f"text            {verdict.num_tokens} tokens, {verdict.text}")
    change = f"{result.perplexity_change:+.2%}"
    click.echo(f"perplexity      {verdict.reference_perplexity:.4f} -> {verdict.perplexity:.4f} ({change})")
    click.echo(f"KL divergence   {verdict.kl_divergence:.5f} nats a token")
    click.echo(f"top-1 agreement {verdict.top1_agreement:.2%}")
    bars = f"perplexity at most {verdict.bars.max_perplexity_change:+.2%}"
    if verdict.bars.min_top1_agreement:
        bars += f", top-1 agreement at least {verdict.bars.min_top1_agreement:.0%}"
    click.echo(f"gate            {'passed' if verdict.has_passed else 'FAILED'}: {bars}")
