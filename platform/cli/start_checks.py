"""What can be found wrong before anything is started: names, ports, model files, sizes against the machine."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec

from remora.cache_actors.memory_budget import available_memory_bytes
from remora.deployments.models.gguf_config import gguf_spec
from remora.deployments.models.gguf_file import GGUFFile
from remora.deployments.models.model_spec import ModelSpec, served_context_len
from remora.deployments.models.refusals import check_servable
from remora.deployments.models.source import ModelFiles, resolve_source
from remora.kernels.base import DecoderShape
from remora.platform.base.config import HttpConfig, RemoraConfig
from remora.platform.base.errors import ConfigError, ModelError
from remora.platform.base.model_config import ModelConfig
from remora.platform.base.ports import free_ports
from remora.platform.base.sql_state_store import check_database_url
from remora.platform.base.state_store import database_url_of
from remora.platform.cli.progress import size_text

#: Blocks of the largest geometry that an extent must hold (design §1).
MIN_BLOCKS_PER_EXTENT = 8
_PAGE_BYTES = 4096


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a model will take. Zeros: known only once it is loaded (it runs through transformers)."""

    name: str
    source: str
    architecture: str
    weights_bytes: int
    #: In the largest precision that it has in any namespace.
    block_bytes: int
    max_model_len: int


def plan_models(config: RemoraConfig, say: Callable[[str], None]) -> list[ModelPlan]:
    """Finds the files of every model and reads their headers, no weights. Hub ids are downloaded here.

    Raises ModelError for a model that is not there or cannot be served, ConfigError for sizes that do not fit.
    """
    plans = []
    for model in config.models:
        plan = _plan_model(model, config)
        plans.append(plan)
        sizes = f", {size_text(plan.weights_bytes)} of {model.weights} weights" if plan.weights_bytes else ""
        say(f"model {model.name}: {plan.architecture}{sizes}, context {plan.max_model_len}")
    return plans


def check_sizes(config: RemoraConfig, plans: list[ModelPlan]) -> None:
    """Raises ConfigError when extents are too small for a model's blocks."""
    by_name = {plan.name: plan for plan in plans}
    for device in config.devices:
        for model in config.models:
            plan = by_name[model.name]
            # Of a pipeline, what an even split gives; the pools refuse stages that turn out larger.
            block_bytes = -(-plan.block_bytes // model.pipeline_stages)
            smallest = _round_up(MIN_BLOCKS_PER_EXTENT * block_bytes)
            if device.name in model.devices and device.extent_bytes < smallest:
                raise ConfigError(
                    f"devices.{device.name}.extent_bytes: {int(device.extent_bytes)} bytes hold "
                    f"{device.extent_bytes // block_bytes} blocks of model {model.name!r} "
                    f"({block_bytes} bytes each); at least {MIN_BLOCKS_PER_EXTENT} must fit: {smallest} bytes "
                    "or more"
                )


def check_memory(config: RemoraConfig, plans: list[ModelPlan]) -> None:
    """Raises ConfigError when weights and arenas of the CPU devices do not fit the memory that is available."""
    on_cpu = {device.name: int(device.arena_bytes) for device in config.devices if device.kind == "cpu"}
    replicas = {model.name: model.num_replicas for model in config.models if model.devices[0] in on_cpu}
    weights = {plan.name: plan.weights_bytes * replicas[plan.name] for plan in plans if plan.name in replicas}
    available = available_memory_bytes()
    largest = max(weights, key=lambda name: weights[name], default="")
    if largest and weights[largest] > available:
        raise ConfigError(
            f"models.{largest}.source: its weights take {size_text(weights[largest])} "
            f"({replicas[largest]} replicas), but {size_text(available)} of memory are available; take `weights: "
            "int8`, a smaller model or fewer replicas"
        )
    needed = sum(weights.values()) + sum(on_cpu.values())
    if needed > available:
        raise ConfigError(
            f"models and devices: {size_text(sum(weights.values()))} of weights and {size_text(sum(on_cpu.values()))} "
            f"of arenas do not fit {size_text(available)} of available memory; lower arena_bytes or serve less"
        )


def check_database(config: RemoraConfig) -> None:
    """Raises ConfigError when there is no driver for the database of sessions. Connects to nothing."""
    check_database_url(database_url_of(config.cluster))


def choose_port(http: HttpConfig, port: int | None) -> int:
    """The port to listen on: `port` of the command line, else the configured one; 0 picks a free one.

    Raises ConfigError when it is taken.
    """
    wanted = http.port if port is None else port
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        if wanted == 0:
            return free_ports(1, http.host)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((http.host, wanted))
    except OSError as error:
        raise ConfigError(
            f"http.port: {wanted} on {http.host} cannot be used ({error.strerror}); choose another with --port or "
            "http.port, or --port 0 for any free one"
        ) from None
    return wanted


def read_spec(model: ModelConfig, *, with_weights: bool = True) -> ModelSpec | None:
    """What the model's files say of it; None for one that runs through transformers.

    Without weights a hub's model is not downloaded as a whole. Raises ModelError.
    """
    return _read_spec(model, resolve_source(model, with_weights=with_weights))


def _plan_model(model: ModelConfig, config: RemoraConfig) -> ModelPlan:
    files = resolve_source(model)
    block_tokens = config.device_of(model).block_tokens
    spec = _read_spec(model, files)
    in_namespaces = [namespace.kv_precisions for namespace in config.namespaces_of(model.name)]
    if spec is None:
        return ModelPlan(
            name=model.name,
            source=str(files.path),
            architecture="runs through transformers",
            weights_bytes=0,
            block_bytes=0,
            max_model_len=model.max_model_len or 0,
        )
    return ModelPlan(
        name=model.name,
        source=str(files.path),
        architecture=spec.architecture,
        weights_bytes=weights_bytes(spec.shape),
        block_bytes=max(
            spec.geometry(block_tokens=block_tokens, kv_precisions=each).block_bytes
            for each in {model.kv_precisions, *(own for own in in_namespaces if own is not None)}
        ),
        max_model_len=spec.max_model_len,
    )


def _read_spec(model: ModelConfig, files: ModelFiles) -> ModelSpec | None:
    if files.kind == "gguf":
        return gguf_spec(model.name, GGUFFile(files.path), weights=model.weights, max_model_len=model.max_model_len)
    from remora.deployments.models.hf_config import decoder_spec, read_config, runs_natively

    config = read_config(files.path, trust_remote_code=model.trust_remote_code)
    model_len = getattr(config, "max_position_embeddings", None) or model.max_model_len
    if not model_len:
        raise ModelError(f"model {model.name!r}: its config names no context length; set max_model_len.")
    context_len = served_context_len(int(model_len), model.max_model_len)
    check_servable(model.name, config, context_len)
    if model.backend == "transformers" or not runs_natively(config):
        return None
    return decoder_spec(model.name, config, weights=model.weights, max_model_len=context_len)


def weights_bytes(shape: DecoderShape) -> int:
    """Memory of a model's weights once packed, to within a few per cent."""
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_attention_heads + shape.num_kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    head = shape.vocab_size * shape.hidden_size
    # Of integers, scales and minimums are an eighth of a byte more.
    matrix_bytes = {"fp32": 4.0, "bf16": 2.0, "int8": 1.125, "int4": 0.625}[shape.weights]
    embed_bytes = 4 if shape.weights == "fp32" else 2
    # The head is packed for products, also when it is tied to the embedding, whose rows are looked up.
    return int((shape.num_layers * layer + head) * matrix_bytes) + head * embed_bytes


def _round_up(num_bytes: int) -> int:
    return (num_bytes + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES
