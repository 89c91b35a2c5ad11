"""`remora bench batch`: the engine alone, with the options and the table of llama.cpp's llama-batched-bench."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Literal

import click

from remora.deployments.models.load import load_model
from remora.platform.base.config import load_config
from remora.platform.base.errors import NotFound
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.batch_load import BatchCase, BatchTimes, run_batch
from remora.platform.cli.number_list import number_list
from remora.platform.cli.table import print_table

_COLUMNS = ["PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"]


@click.command(name="batch")
@click.option("-m", "--model", "name", help="Of the configuration; default: its first.")
@click.option("-f", "--config", "path", type=click.Path(path_type=Path), help="Default: what `remora up` serves.")
@click.option("-npp", "prompt_tokens", callback=number_list, default="128", show_default=True, help="Tokens a prompt.")
@click.option("-ntg", "output_tokens", callback=number_list, default="64", show_default=True, help="Tokens generated.")
@click.option(
    "-npl", "num_sequences", callback=number_list, default="1,8,32", show_default=True, help="Sequences at once."
)
@click.option("-pps", "shared_prompt", is_flag=True, help="All sequences share one prompt, which is computed once.")
@click.option(
    "-t",
    "--threads",
    type=click.IntRange(min=1),
    help="Default: those of the model's device, else the cores of this process.",
)
@click.option("--output", type=click.Choice(["table", "jsonl"]), default="table", show_default=True)
def batch(
    name: str | None,
    path: Path | None,
    prompt_tokens: list[int],
    output_tokens: list[int],
    num_sequences: list[int],
    shared_prompt: bool,
    threads: int | None,
    output: Literal["table", "jsonl"],
) -> None:
    """Measures one model's engine in this process, without Ray and HTTP.

    T_PP is the time until all sequences have their first token, T_TG the rest, T the sum; S is N_KV / T.
    """
    from remora.platform.cli.up import DEFAULT_CONFIG

    config = load_config(path or DEFAULT_CONFIG)
    model = _find(config.models, name)
    device = config.device_of(model)
    loaded = load_model(model, block_tokens=device.block_tokens, num_threads=threads or device.num_threads)
    longest = max(prompt_tokens) + max(output_tokens)
    if longest > loaded.max_model_len:
        raise click.BadParameter(
            f"{longest} tokens do not fit the context of {loaded.max_model_len}", param_hint="-npp and -ntg"
        )
    run_batch(loaded, BatchCase(prompt_tokens=16, output_tokens=4, num_sequences=1))  # the first run is slower
    rows = []
    for prompt, generated, sequences in itertools.product(prompt_tokens, output_tokens, num_sequences):
        case = BatchCase(
            prompt_tokens=prompt, output_tokens=generated, num_sequences=sequences, shared_prompt=shared_prompt
        )
        row = _row(case, run_batch(loaded, case, max_step_tokens=model.max_step_tokens))
        if output == "jsonl":
            click.echo(
                json.dumps({"model": model.name, "decoder": loaded.decoder.name, "is_pp_shared": shared_prompt, **row})
            )
        rows.append(row)
    if output == "table":
        click.echo(f"{model.name} on {loaded.decoder.name}")
        print_table(_COLUMNS, [list(row.values()) for row in rows])


def _find(models: tuple[ModelConfig, ...], name: str | None) -> ModelConfig:
    found = [model for model in models if name in (None, model.name)]
    if not found:
        raise NotFound(f"There is no model {name!r}; one of: {', '.join(model.name for model in models)}.")
    return found[0]


def _row(case: BatchCase, times: BatchTimes) -> dict[str, float]:
    """In the names of llama-batched-bench's JSON lines."""
    prompts = case.prompt_tokens * (1 if case.shared_prompt else case.num_sequences)
    whole_s = times.prompt_s + times.output_s
    return {
        "pp": case.prompt_tokens,
        "tg": case.output_tokens,
        "pl": case.num_sequences,
        "n_kv": case.num_kv_tokens,
        "t_pp": round(times.prompt_s, 3),
        "speed_pp": round(prompts / times.prompt_s, 1),
        "t_tg": round(times.output_s, 3),
        "speed_tg": round(times.output_tokens / times.output_s, 1) if times.output_s else 0.0,
        "t": round(whole_s, 3),
        "speed": round(case.num_kv_tokens / whole_s, 1),
    }
