"""`remora size`: the memory that a model and its conversations take, before anything is started."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click

from remora.deployments.engine.base import EngineConfig
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.platform.base.config import RemoraConfig, load_config, parse_config
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.progress import size_text
from remora.platform.cli.start_checks import MIN_BLOCKS_PER_EXTENT, read_spec, weights_bytes
from remora.platform.cli.table import print_table
from remora.platform.cli.up import DEFAULT_CONFIG

#: Of K and V: those that a configuration may ask for, but for those whose V is better than K or much worse.
_PRECISIONS: Final[tuple[KVPrecision, ...]] = (
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("bf16", "int8"),
    ("int8", "int8"),
    ("int8", "int4"),
    ("int5", "int4"),
    ("int4", "int4"),
)
_LEAST_EXTENT_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be kept."""

    num_sessions: int
    context_tokens: int
    #: Tokens at the beginning that all sessions have in common, for instance a system prompt.
    shared_tokens: int
    #: Sessions that generate at the same time; each holds a little more than its tokens.
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSize:
    """What a load takes in one precision of K and V."""

    k: str
    v: str
    token_bytes: int
    session_bytes: int
    total_bytes: int
    #: The whole in extents: what `arena_bytes` must be.
    arena_bytes: int
    extent_bytes: int


def kv_size(geometry: KVGeometry, load: Load) -> KVSize:
    """Blocks are shared as wholes; the rest of a session is its own, up to the end of its last block."""
    block_tokens, block_bytes = geometry.block_tokens, geometry.block_bytes
    session_blocks = -(-load.context_tokens // block_tokens)
    shared_blocks = min(load.shared_tokens // block_tokens, session_blocks) if load.num_sessions > 1 else 0
    reserve_blocks = load.num_running * EngineConfig().num_reserve_blocks
    num_blocks = shared_blocks + load.num_sessions * (session_blocks - shared_blocks) + reserve_blocks
    extent_bytes = max(_LEAST_EXTENT_BYTES, -(-MIN_BLOCKS_PER_EXTENT * block_bytes // 4096) * 4096)
    num_extents = -(-num_blocks // (extent_bytes // block_bytes))
    (group,) = geometry.groups
    return KVSize(
        k=group.k_precision,
        v=group.v_precision,
        token_bytes=group.token_bytes(),
        session_bytes=session_blocks * block_bytes,
        total_bytes=num_blocks * block_bytes,
        arena_bytes=max(2, num_extents) * extent_bytes,
        extent_bytes=extent_bytes,
    )


@click.command()
@click.option("-m", "--model", "name", required=True, help="Model of the configuration, or a source as it takes them.")
@click.option("--sessions", default=1, show_default=True, type=click.IntRange(1), help="Conversations to keep.")
@click.option("--context", type=click.IntRange(1), help="Tokens of each; default: the model's context.")
@click.option("--shared", default=0, type=click.IntRange(0), help="Of those, in common at the beginning.")
@click.option("--running", type=click.IntRange(0), help="Of the sessions, generating at once; default: as many as can.")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="A configuration.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
def size(
    name: str,
    sessions: int,
    context: int | None,
    shared: int,
    running: int | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Memory of a model's weights and of KV, for each precision that can be served.

    A quantity of the model's files, not of a run: no weights are read. Exit code 1 for a model that cannot be sized.
    """
    model, block_tokens = _find_model(load_config(config_file or DEFAULT_CONFIG), name)
    spec = read_spec(model, with_weights=False)
    if spec is None:
        raise ModelError(f"model {name!r} runs through transformers: its sizes are known only once it is loaded")
    context_tokens = context or spec.max_model_len
    if shared > context_tokens:
        raise click.UsageError(f"--shared: {shared} tokens are more than the {context_tokens} of a session")
    num_running = min(sessions, model.max_num_seqs * model.num_replicas) if running is None else min(running, sessions)
    load = Load(num_sessions=sessions, context_tokens=context_tokens, shared_tokens=shared, num_running=num_running)
    own = spec.geometry(block_tokens=block_tokens, kv_precisions=("bf16", "bf16"))
    found = [kv_size(own.with_precision(kv_precision), load) for kv_precision in _PRECISIONS]
    weights = weights_bytes(spec.shape)
    if as_json:
        document = {"weights_bytes": weights, "block_tokens": block_tokens, "load": asdict(load)}
        click.echo(json.dumps({**document, "kv": [asdict(each) for each in found]}, indent=2))
        return
    shape = spec.shape
    click.echo(
        f"{name}: {spec.architecture}, {shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim}; "
        f"{size_text(weights)} of {shape.weights} weights a replica\n"
        f"{sessions:,} sessions of {context_tokens:,} tokens, {shared:,} of them shared; "
        f"{num_running:,} generate at once"
    )
    print_table(
        ["KV", "A TOKEN", "A SESSION", "ALL SESSIONS", "ARENA_BYTES", "EXTENT_BYTES"],
        [
            [
                each.k if each.k == each.v != "int4" else f"K {each.k}, V {each.v}",  # the word int4 is int5/int4
                size_text(each.token_bytes),
                size_text(each.session_bytes),
                size_text(each.total_bytes),
                size_text(each.arena_bytes),
                size_text(each.extent_bytes),
            ]
            for each in found
        ],
    )
    if context_tokens > spec.max_model_len:
        click.echo(f"\nThe model serves {spec.max_model_len:,} tokens of context: longer sessions must roll.")


def _find_model(config: RemoraConfig, name: str) -> tuple[ModelConfig, int]:
    """The model and the tokens of a block on its device."""
    found = [model for model in config.models if model.name == name]
    if not found:
        (model,) = parse_config({"models": [{"name": "sized", "source": name}]}).models
        return model, config.devices[0].block_tokens
    return found[0], config.device_of(found[0]).block_tokens
