"""The models of the configuration, and how their KV is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from remora.platform.base.config_types import Name, NamespaceName, Section

KVWord = Literal["bf16", "fp32", "int8", "int5", "int4"]


class KVPrecisionConfig(Section):
    """K and V apart: `{k: int8, v: int4}`."""

    k: KVWord = "bf16"
    v: KVWord = "bf16"


#: How pydantic's locations call the two forms of kv_precision; messages leave them out.
KV_FORMS = ("both", "apart")
KVPrecision = Annotated[
    Annotated[KVWord, Tag("both")] | Annotated[KVPrecisionConfig, Tag("apart")],
    Discriminator(lambda value: "apart" if isinstance(value, dict | KVPrecisionConfig) else "both"),
]


def precision_pair(given: KVWord | KVPrecisionConfig) -> tuple[KVWord, KVWord]:
    """Of K and of V. The word int4 alone keeps five bits of K, which needs them more than V."""
    if isinstance(given, KVPrecisionConfig):
        return (given.k, given.v)
    return ("int5", "int4") if given == "int4" else (given, given)


class ModelConfig(Section):
    """One served model."""

    name: Name
    #: A local folder, a `.gguf` file, a hub id ("org/name"), or `package:PYTHON_PACKAGE/FILE`.
    source: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    weights: Literal["bf16", "fp32", "int8", "int4"] = "bf16"
    #: A word for K and V, or one for each.
    kv_precision: KVPrecision = "bf16"
    #: Serve in a precision that `remora accuracy` has measured and that failed its gate; its namespaces' too.
    force_precision: bool = False
    #: Models whose KV a session that comes from them may bring, and this one uses as it is: docs/moving.md.
    compatible_with: tuple[Name, ...] = ()
    #: Use such KV although `remora accuracy` has measured what it costs, and it failed its gate.
    force_compatible: bool = False
    #: Context in tokens; None: the model's own, at most 8192.
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    #: Sequences that run at once in one replica.
    max_num_seqs: Annotated[int, Field(ge=1, le=1024)] = 32
    #: Tokens that one engine step computes at most.
    max_step_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    #: Of the time of a step in which sequences decode, what prompts may take at most: bounds how long they delay those.
    prompt_share: Annotated[float, Field(ge=0, le=1)] = 0.75
    num_replicas: Annotated[int, Field(ge=1, le=64)] = 1
    #: Its part of the time of a device, against other busy models there; None: the weights of its namespaces, added up.
    step_weight: Annotated[float, Field(gt=0, le=1000)] | None = None
    #: Seconds without requests after which its replicas stop, until the next request; None: they stay.
    idle_timeout_s: Annotated[float, Field(ge=1, le=1e7)] | None = None
    #: Longest that a request waits for replicas that were stopped so.
    wake_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 300.0
    #: Whether a stream goes on elsewhere when its replica is lost; without that the router keeps none of its tokens.
    failover: bool = True
    device: Name = "cpu0"
    #: Further devices of a node with blocks as long: its replicas there are spread over all of them in turn.
    more_devices: tuple[Name, ...] = ()
    #: Parts into which its layers are split, each on a device of its own: docs/pipelines.md.
    pipeline_stages: Annotated[int, Field(ge=1, le=64)] = 1
    #: Devices of the stages in order; the replica computes the first itself. In place of `device`.
    stage_devices: tuple[Name, ...] = ()
    #: Layers of each stage; empty: balanced by what they cost.
    stage_layers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    #: "native" (own decoder), "transformers" (any full-attention causal model, slower), or "auto".
    backend: Literal["auto", "native", "transformers"] = "auto"
    trust_remote_code: bool = False
    #: Namespace of requests that name none; None: the model's first namespace.
    default_namespace: NamespaceName | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all devices on which it has KV."""
        return self.stage_devices or (self.device, *self.more_devices)

    @property
    def first_devices(self) -> tuple[str, ...]:
        """Names of the devices on which a replica's process computes: one of them for each replica."""
        return self.stage_devices[:1] or self.devices

    @property
    def kv_precisions(self) -> tuple[KVWord, KVWord]:
        """Of K and of V."""
        return precision_pair(self.kv_precision)


def check_compatible(models: Mapping[str, ModelConfig], block_tokens: Mapping[str, int]) -> None:
    """Raises ValueError for models that cannot be compatible, as far as the configuration tells; whether their KV has
    the same shape and their tokenizers are equal shows when a replica starts. `block_tokens`: of each device."""
    for model in models.values():
        where = f"models.{model.name}.compatible_with"
        for name in model.compatible_with:
            if name == model.name:
                raise ValueError(f"{where}: {name!r} is the model itself; leave it out")
            if name not in models:
                raise ValueError(f"{where}: no model {name!r}; one of {sorted(set(models) - {model.name})}")
            if model.compatible_with.count(name) > 1:
                raise ValueError(f"{where}: {name!r} is named twice")
            other = models[name]
            for each in (model, other):
                if each.pipeline_stages > 1:
                    raise ValueError(f"{where}: {name!r}: {each.name!r} has pipeline_stages; its KV lies in parts")
            own_length, length = (block_tokens[each.devices[0]] for each in (model, other))
            if own_length != length:
                raise ValueError(
                    f"{where}: {name!r} is on devices with block_tokens of {length}, and this model with {own_length}"
                )


def check_stages(model: ModelConfig) -> None:
    """Raises ValueError, with the field's whole name, for stages that do not agree with each other."""
    where, num_stages = f"models.{model.name}", model.pipeline_stages
    for field, given in (("stage_devices", model.stage_devices), ("stage_layers", model.stage_layers)):
        if given and num_stages == 1:
            raise ValueError(f"{where}.{field}: only for a pipeline; say in pipeline_stages how many stages it has")
        if len(given) != num_stages > 1 and (given or field == "stage_devices"):
            raise ValueError(f"{where}.{field}: {len(given)} entries for {num_stages} pipeline_stages; one for each")
    if num_stages == 1:
        return
    twice = sorted({name for name in model.stage_devices if model.stage_devices.count(name) > 1})
    if twice:
        raise ValueError(f"{where}.stage_devices: {twice[0]!r} is used twice; each stage has a device of its own")
    if model.device not in (ModelConfig.model_fields["device"].default, model.stage_devices[0]):
        raise ValueError(
            f"{where}.device: {model.device!r} is not the first of stage_devices, {model.stage_devices[0]!r}; leave "
            "one of them out"
        )
    if model.more_devices:
        raise ValueError(
            f"{where}.more_devices: not with pipeline_stages; every replica has a process on each of its stage_devices"
        )
    if model.backend == "transformers":
        raise ValueError(f"{where}.backend: 'transformers' cannot be split; only native models have pipeline_stages")
