"""The one configuration file: `remora up`, `serve deploy` and the chart read the same YAML.

Every value has a documented default; a wrong value raises ConfigError with its name, its value and what is allowed.
Sizes are written as numbers of bytes or as text ("512MiB", "1.5GB").
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ByteSize, Field, ValidationError, field_validator, model_validator

from remora.platform.base.config_types import Name
from remora.platform.base.config_types import Section as _Section
from remora.platform.base.errors import ConfigError
from remora.platform.base.ids import NamespaceId
from remora.platform.base.model_config import KV_FORMS, KVPrecisionConfig, ModelConfig, check_compatible, check_stages
from remora.platform.base.namespace_config import NamespaceConfig
from remora.platform.base.namespace_tree import parent_of
from remora.platform.base.rebalance_config import RebalanceConfig
from remora.platform.base.replication_config import ReplicationConfig
from remora.platform.base.serve_environment import DRAIN_TIMEOUT_S, is_loopback
from remora.platform.base.tenants import TenantConfig, check_tenants

MiB = 1024 * 1024


class HttpConfig(_Section):
    """Where clients connect. Without API keys only loopback is allowed, or a network that is declared as trusted."""

    #: Whoever reaches the port may do everything: access is controlled outside (network policy, ingress with login).
    #: Not needed with API keys.
    trusted_network: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    max_body_bytes: ByteSize = ByteSize(16 * MiB)
    #: Seconds a request may wait for its first token before it is answered 429.
    queue_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    num_routers: Annotated[int, Field(ge=1, le=64)] = 1
    #: On a cluster: seconds for which a router that a changed configuration replaces goes on with the streams it has.
    drain_timeout_s: Annotated[float, Field(gt=0, le=3600)] = DRAIN_TIMEOUT_S


class DeviceConfig(_Section):
    """One device of a node and the arena in it."""

    name: Name = "cpu0"
    kind: Literal["cpu", "cuda"] = "cpu"
    arena_bytes: ByteSize = ByteSize(1024 * MiB)
    #: Slice of the arena that one geometry leases at a time; holds at least 8 blocks of the largest geometry.
    extent_bytes: ByteSize = ByteSize(16 * MiB)
    #: Tokens in a block; a power of two.
    block_tokens: Literal[16, 32, 64, 128] = 32
    #: Memory of the device besides KV (weights, workspace) that replicas may reserve; None: what the node has.
    reserved_bytes: ByteSize | None = None
    #: CPU cores that engine steps use, one thread each; None: all the process may use.
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    #: Resource of Ray that only nodes with this device offer (`ray start --resources`); a replica or stage takes 1.
    #: None: every node has the device, of kind cuda every node with a GPU.
    node_resource: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.:-]{0,127}$")] | None = None
    #: Which cached block goes first: docs/eviction.md.
    eviction: Literal["lru", "s3fifo", "arc", "value"] = "value"


class TelemetryConfig(_Section):
    """Spans go to JSON-lines files in the state directory, and by OTLP when an endpoint is set."""

    enabled: bool = True
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    #: Of requests that are not sampled, those that fail or take so many seconds are kept all the same; None: none.
    keep_slow_s: Annotated[float, Field(gt=0)] | None = 10.0
    #: Whether spans hold what was asked and answered.
    capture_content: bool = False
    #: e.g. "http://collector:4317" (gRPC) or "http://collector:4318" (HTTP).
    otlp_endpoint: str | None = None
    otlp_protocol: Literal["grpc", "http"] = "grpc"
    #: Bound of the JSON-lines file of one process.
    max_file_bytes: ByteSize = ByteSize(64 * MiB)


class ClusterConfig(_Section):
    name: Name = "default"
    #: Arenas, journals, traces and the instance record live below it; None: the user's state directory.
    state_dir: Path | None = None
    #: "local" starts a Ray of its own; else the address of a running cluster.
    ray_address: str = "local"
    object_store_bytes: ByteSize = ByteSize(128 * MiB)
    #: Packed weights kept on disk below state_dir, for the next start; 0 keeps none.
    packed_weights_bytes: ByteSize = ByteSize(16384 * MiB)
    #: Where sessions are kept, as SQLAlchemy writes it; None: a SQLite file in the state directory.
    database_url: Annotated[str, Field(min_length=1)] | None = None
    #: Run check_integrity() of every stateful class whenever it is idle.
    debug: bool = False

    @field_validator("database_url")
    @classmethod
    def _is_database_url(cls, url: str | None) -> str | None:
        if url is not None and not re.match(r"[a-z0-9_]+(\+[a-z0-9_]+)?://", url):
            raise ValueError(f"{url!r} is no database URL, e.g. sqlite:////var/lib/remora/state.sqlite")
        return url


class RemoraConfig(_Section):
    """The whole file."""

    cluster: ClusterConfig = ClusterConfig()
    http: HttpConfig = HttpConfig()
    devices: Annotated[tuple[DeviceConfig, ...], Field(min_length=1)] = (DeviceConfig(),)
    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    namespaces: tuple[NamespaceConfig, ...] = ()
    telemetry: TelemetryConfig = TelemetryConfig()
    rebalance: RebalanceConfig = RebalanceConfig()
    replication: ReplicationConfig = ReplicationConfig()
    #: Who may use the platform; empty: there are no API keys, and whoever reaches the port may do everything.
    tenants: tuple[TenantConfig, ...] = ()
    #: A YAML file with the list of tenants, in place of it here; relative to this file.
    tenants_file: Path | None = None

    @model_validator(mode="after")
    def _access_is_controlled(self) -> RemoraConfig:
        if not (is_loopback(self.http.host) or self.tenants or self.http.trusted_network):
            raise ValueError(
                f"http.host: {self.http.host!r} is not allowed: without API keys only loopback is (127.0.0.1, ::1 or "
                "localhost); configure tenants, or say http.trusted_network: true if access is controlled outside"
            )
        check_tenants(self.tenants, ((namespace.name, namespace.tenant) for namespace in self.namespaces))
        return self

    @model_validator(mode="after")
    def _names_agree(self) -> RemoraConfig:
        for what, names in (
            ("devices", [device.name for device in self.devices]),
            ("models", [model.name for model in self.models]),
            ("namespaces", [namespace.name for namespace in self.namespaces]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what}: the name {twice[0]!r} is used twice; names must be unique")
        devices = {device.name: device for device in self.devices}
        models = {model.name: model for model in self.models}
        for model in self.models:
            check_stages(model)
            _check_devices(model, devices)
            if model.default_namespace is not None and model.default_namespace not in {
                namespace.name for namespace in self.namespaces if namespace.model == model.name
            }:
                raise ValueError(
                    f"models.{model.name}.default_namespace: {model.default_namespace!r} is no namespace of this model"
                )
        check_compatible(models, {device.name: device.block_tokens for device in self.devices})
        guaranteed = dict.fromkeys(devices, 0)
        namespaces = {NamespaceId(namespace.name): namespace for namespace in self.namespaces}
        below = dict.fromkeys(namespaces, 0)
        for namespace in self.namespaces:
            if namespace.model not in models:
                raise ValueError(
                    f"namespaces.{namespace.name}.model: no model {namespace.model!r}; one of {sorted(models)}"
                )
            if namespace.limit is not None and namespace.guaranteed > namespace.limit:
                raise ValueError(
                    f"namespaces.{namespace.name}.guaranteed: {namespace.guaranteed} bytes exceed its limit "
                    f"of {namespace.limit} bytes"
                )
            if namespace.kv_precision is not None and models[namespace.model].pipeline_stages > 1:
                raise ValueError(
                    f"namespaces.{namespace.name}.kv_precision: model {namespace.model!r} has pipeline_stages, and "
                    "then one precision for all its namespaces; set it there"
                )
            if namespace.kv_replicas > 1 and models[namespace.model].pipeline_stages > 1:
                raise ValueError(
                    f"namespaces.{namespace.name}.kv_replicas: {namespace.kv_replicas} is not possible yet for KV of "
                    f"a pipeline, and model {namespace.model!r} has pipeline_stages; 1 is"
                )
            on_gpu = [name for name in models[namespace.model].devices if devices[name].kind == "cuda"]
            if namespace.kv_replicas > 1 and on_gpu:
                raise ValueError(
                    f"namespaces.{namespace.name}.kv_replicas: {namespace.kv_replicas} is not possible yet for KV on "
                    f"GPUs, and {on_gpu[0]!r} is one; 1 is"
                )
            parent_id = parent_of(NamespaceId(namespace.name), namespaces)
            if parent_id is not None and namespace.kv_precision is not None:
                raise ValueError(
                    f"namespaces.{namespace.name}.kv_precision: it is a part of {parent_id!r} and has its precision; "
                    "set it there"
                )
            if parent_id is None:
                for name in models[namespace.model].devices:
                    guaranteed[name] += namespace.guaranteed
            elif (model_name := namespaces[parent_id].model) != namespace.model:
                raise ValueError(
                    f"namespaces.{namespace.name}.model: {namespace.model!r}, but its parent {parent_id!r} is of "
                    f"model {model_name!r}"
                )
            else:
                below[parent_id] += namespace.guaranteed
        for parent_id, parent in namespaces.items():
            if below[parent_id] > parent.guaranteed:
                raise ValueError(
                    f"namespaces.{parent_id}.guaranteed: {int(parent.guaranteed)} bytes, but those below it are "
                    f"guaranteed {below[parent_id]} bytes, which are parts of it"
                )
        for device in self.devices:
            if guaranteed[device.name] > device.arena_bytes:
                raise ValueError(
                    f"namespaces: guarantees on device {device.name!r} add up to {guaranteed[device.name]} bytes, "
                    f"more than its arena_bytes of {int(device.arena_bytes)}"
                )
            if device.extent_bytes % 4096 or device.arena_bytes < 2 * device.extent_bytes:
                raise ValueError(
                    f"devices.{device.name}.extent_bytes: {int(device.extent_bytes)} must be a multiple of 4096 and "
                    f"at most half of arena_bytes ({int(device.arena_bytes)})"
                )
        return self

    def device_of(self, model: ModelConfig, replica_rank: int = 0) -> DeviceConfig:
        """Where the process of the model's replica of that rank on its node computes; of a pipeline, its stage 0."""
        wanted = model.first_devices[replica_rank % len(model.first_devices)]
        return next(device for device in self.devices if device.name == wanted)

    def namespaces_of(self, model_name: str) -> tuple[NamespaceConfig, ...]:
        """The model's namespaces, its default first. A model without any gets one of its own name."""
        own = [namespace for namespace in self.namespaces if namespace.model == model_name]
        if not own:
            return (NamespaceConfig(name=model_name, model=model_name),)
        model = next(model for model in self.models if model.name == model_name)
        default = model.default_namespace or own[0].name
        return tuple(sorted(own, key=lambda namespace: namespace.name != default))

    def step_weight_of(self, model: ModelConfig) -> float:
        """The model's weight at the step lock of its device; parts of a namespace are counted with it."""
        if model.step_weight is not None:
            return model.step_weight
        own = {NamespaceId(namespace.name): namespace for namespace in self.namespaces_of(model.name)}
        return sum(namespace.weight for name, namespace in own.items() if parent_of(name, own) is None)


def _check_devices(model: ModelConfig, devices: dict[str, DeviceConfig]) -> None:
    """Raises ValueError unless the model's devices exist and have blocks of one length."""
    where = f"models.{model.name}"
    if not model.stage_devices and model.device not in devices:
        raise ValueError(f"{where}.device: no device {model.device!r}; one of {sorted(devices)}")
    field = "stage_devices" if model.stage_devices else "more_devices"
    for name in model.devices:
        if name not in devices or model.devices.count(name) > 1:
            which = "no device" if model.stage_devices else "no other"
            raise ValueError(f"{where}.{field}: {name!r} is {which} of {sorted(devices)}")
        first = model.devices[0]
        if devices[name].block_tokens != devices[first].block_tokens:
            raise ValueError(
                f"{where}.{field}: block_tokens of {name!r} are {devices[name].block_tokens}, those of {first!r} "
                f"{devices[first].block_tokens}"
            )
    on_gpu = [name for name in model.devices if devices[name].kind == "cuda"]
    if on_gpu and model.weights in ("int8", "int4"):
        raise ValueError(
            f"{where}.weights: {model.weights} is not served on GPUs yet, and {on_gpu[0]!r} is one; bf16 and fp32 are"
        )
    if on_gpu and model.backend == "transformers":
        raise ValueError(f"{where}.backend: transformers is not served on GPUs, and {on_gpu[0]!r} is one; auto is")
    if model.stage_devices and on_gpu and not model.stage_layers:
        raise ValueError(
            f"{where}.stage_layers: needed with stages on GPUs, and {on_gpu[0]!r} is one: what layers take is "
            "measured on CPUs only"
        )


def _explain(error: ValidationError) -> str:
    lines = []
    items = error.errors()
    for item in items:
        # A list whose only entry is wrong counts as empty, which says nothing new.
        if item["type"] == "too_short" and any(
            other is not item and other["loc"][: len(item["loc"])] == item["loc"] for other in items
        ):
            continue
        where = ".".join(str(part) for part in item["loc"] if part not in KV_FORMS) or "config"
        message = re.sub(r"^Value error, ", "", item["msg"])
        if item["type"] == "value_error":
            lines.append(message if where == "config" else f"{where}: {message}")
        elif item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key {item['loc'][-1]!r}; allowed here: {_keys_at(item['loc'][:-1])}")
        elif item["type"] == "missing":
            lines.append(f"{where}: is required")
        elif item["type"] == "model_type":
            lines.append(f"{where}: {_shorten(item['input'])} is not allowed: must be a mapping of keys to values")
        elif item["type"] == "too_short":
            lines.append(f"{where}: must have at least one entry")
        else:
            lines.append(f"{where}: {_shorten(item['input'])} is not allowed: {message}")
    return "\n".join(lines)


def _keys_at(location: tuple[int | str, ...]) -> str:
    sections: dict[int | str, type[BaseModel]] = {
        "cluster": ClusterConfig,
        "http": HttpConfig,
        "devices": DeviceConfig,
        "models": ModelConfig,
        "namespaces": NamespaceConfig,
        "telemetry": TelemetryConfig,
        "rebalance": RebalanceConfig,
        "replication": ReplicationConfig,
        "tenants": TenantConfig,
    }
    section = sections[location[0]] if location else RemoraConfig
    for part in location[1:]:
        inner = section.model_fields[part].annotation if part in section.model_fields else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            section = inner
        elif part == "kv_precision":
            section = KVPrecisionConfig
    return ", ".join(section.model_fields)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_config(data: Any) -> RemoraConfig:
    """Validates a loaded document. Raises ConfigError with one line per wrong value."""
    try:
        return RemoraConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def load_config(path: Path) -> RemoraConfig:
    """Reads and validates a YAML file. Raises ConfigError; the message starts with the file's name."""
    data = _load_yaml(path)
    if isinstance(data, dict) and isinstance(data.get("tenants_file"), str):
        if data.get("tenants"):
            raise ConfigError(f"{path}:\ntenants_file: not allowed beside tenants; give one of them")
        data["tenants"] = _load_yaml(path.parent / data["tenants_file"])
    try:
        return parse_config(data if data is not None else {})
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None


def _load_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
