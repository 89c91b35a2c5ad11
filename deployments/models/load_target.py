"""The device that a model is loaded for: what makes its decoder, and how much room there is for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from remora.cache_actors.memory_budget import MiB, available_memory_bytes
from remora.kernels.base import Decoder, DecoderShape, Weights
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.config import DeviceConfig
from remora.platform.base.errors import KernelError, ModelError
from remora.platform.base.model_config import ModelConfig

if TYPE_CHECKING:
    from remora.kernels.cuda.runtime import Runtime


class MakeDecoder(Protocol):
    """kernels/registry.py's make_decoder, or a decoder's class."""

    def __call__(self, shape: DecoderShape, weights: Weights, geometry: KVGeometry, *, num_threads: int) -> Decoder: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """Where weights go."""

    kind: Literal["cpu", "cuda"] = "cpu"
    make_decoder: MakeDecoder
    available_bytes: Callable[[], int]
    #: What its steps take besides weights and KV, at most.
    workspace_bytes: Callable[[DecoderShape], int] = lambda shape: 0

    def check_memory(self, name: str, weights_bytes: int, workspace_bytes: int = 0) -> None:
        """Raises ModelError with all numbers when the model does not fit."""
        if self.kind == "cpu":
            check_memory(name, weights_bytes, self.available_bytes())
            return
        free_bytes = self.available_bytes()
        if weights_bytes + workspace_bytes > free_bytes:
            raise ModelError(
                f"model {name!r} needs {weights_bytes // MiB} MiB for its weights and {workspace_bytes // MiB} MiB for "
                f"its steps, and beside the arena {free_bytes // MiB} MiB of the GPU are free; lower arena_bytes of "
                "the device, or the model's max_step_tokens or max_num_seqs, or take a smaller model."
            )


def check_memory(name: str, needed_bytes: int, available_bytes: int) -> None:
    """Raises ModelError with both numbers when weights do not fit."""
    if needed_bytes > available_bytes:
        raise ModelError(
            f"model {name!r} needs {needed_bytes // MiB} MiB for its weights, and {available_bytes // MiB} MiB of "
            "memory are available; choose `weights: int8`, a smaller model, or a machine with more memory."
        )


def host_target(make_decoder: MakeDecoder | None = None) -> LoadTarget:
    """The memory and the cores of this process; `make_decoder`: default kernels/registry.py's."""
    from remora.kernels import registry

    return LoadTarget(
        make_decoder=make_decoder or registry.make_decoder, available_bytes=lambda: available_memory_bytes()
    )


def device_target(device: DeviceConfig, model: ModelConfig) -> LoadTarget:
    """For a replica or a stage on a device; of kind cuda it is the GPU that this process sees.

    Raises ModelError when that cannot be used.
    """
    if device.kind == "cpu":
        return host_target()
    try:
        from remora.kernels.cuda.card import CardRuntime

        runtime = CardRuntime()
    except KernelError as error:
        raise ModelError(f"model {model.name!r} on devices.{device.name}: {error}") from None
    return cuda_target(runtime, model)


def cuda_target(runtime: Runtime, model: ModelConfig) -> LoadTarget:
    """The device of a runtime."""
    from remora.kernels.cuda.decoder import CudaDecoder
    from remora.kernels.cuda.workspace import workspace_bytes

    def make(shape: DecoderShape, weights: Weights, geometry: KVGeometry, *, num_threads: int) -> Decoder:
        return CudaDecoder(shape, weights, geometry, runtime)

    return LoadTarget(
        kind="cuda",
        make_decoder=make,
        available_bytes=lambda: runtime.memory().free_bytes,
        workspace_bytes=lambda shape: workspace_bytes(
            shape, max_step_tokens=model.max_step_tokens, max_num_seqs=model.max_num_seqs
        ),
    )
