"""Weights that a decoder has packed: its memory, and what another decoder needs to take it over as it lies there."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import msgspec
import numpy as np

from remora.kernels.base import DecoderShape
from remora.kernels.native.library import DTYPES, LEVELS, WEIGHT_KINDS, NativeLibrary, ShapeStruct, load_library
from remora.kernels.native.weight_memory import WeightMemory
from remora.platform.base.errors import KernelError


class GroupedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer of int8 or int4: only who packs it knows which of both it is."""

    #: As in kernels.base.Weights.
    name: str
    precision: str
    has_minimum: bool


class PackedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory does not say by itself."""

    #: From the start of the memory.
    num_bytes: int
    #: The head is the embedding, packed once.
    tied_head: bool
    #: [head_dim / 2] fp32
    rope_inv_freq: tuple[float, ...]
    #: In the order in which they were packed.
    grouped: tuple[GroupedLayer, ...]


class PackedWeights(NamedTuple):
    manifest: PackedManifest
    memory: WeightMemory


class Place(NamedTuple):
    """A weight as the library numbers it; layer -1: of no layer."""

    kind: str
    layer: int

    @property
    def kind_number(self) -> int:
        return WEIGHT_KINDS.index(self.kind)


def place_of(name: str) -> Place:
    """Raises KernelError for a name that kernels.base.Weights does not have."""
    *prefix, kind = name.split(".")
    layer = int(prefix[1]) if len(prefix) == 2 and prefix[0] == "layers" and prefix[1].isdecimal() else -1
    if kind not in WEIGHT_KINDS or (prefix and layer < 0):
        raise KernelError(f"weight {name} is not a weight of this decoder")
    return Place(kind, layer)


def adopt_weights(library: NativeLibrary, handle: int, manifest: PackedManifest) -> None:
    """Completes a decoder that was made on filled memory. Raises KernelError when the manifest is of other weights."""
    functions = library.functions
    for layer in manifest.grouped:
        place = place_of(layer.name)
        library.check(
            functions.remora_decoder_adopt_grouped(
                handle, place.kind_number, place.layer, DTYPES[layer.precision], layer.has_minimum
            )
        )
    rope = np.asarray(manifest.rope_inv_freq, np.float32)
    place = place_of("rope_inv_freq")
    library.check(
        functions.remora_decoder_set_weight(
            handle, place.kind_number, place.layer, rope.ctypes.data, DTYPES["fp32"], 1, len(rope)
        )
    )
    library.check(functions.remora_decoder_finish(handle))
    num_bytes = int(functions.remora_decoder_weight_bytes(handle))
    if num_bytes != manifest.num_bytes:
        raise KernelError(f"packed weights of {manifest.num_bytes} bytes are not those of a decoder of {num_bytes}")


def packing_id(level: str | None = None) -> str:
    """What decides how this build packs weights on this machine. Raises KernelError without native kernels."""
    library = load_library()
    return f"{library.functions.remora_packing_version()}-{LEVELS[library.level_number(level)]}"


def max_packed_bytes(shape: DecoderShape) -> int:
    """Bytes that the weights of the shape take at most. Raises KernelError for a shape that is not served."""
    library = load_library()
    num_bytes = int(library.functions.remora_max_weight_bytes(ctypes.byref(shape_struct(shape, tied_head=False))))
    library.check(num_bytes)
    return num_bytes


def shape_struct(shape: DecoderShape, *, tied_head: bool) -> ShapeStruct:
    """`Shape` of step_work.h; `tied_head`: the embedding is packed once, for both."""
    scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale
    return ShapeStruct(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        qk_norm=shape.qk_norm,
        qkv_bias=shape.qkv_bias,
        output_bias=shape.output_bias,
        mlp_bias=shape.mlp_bias,
        tied_head=tied_head,
        has_embedding=shape.has_embedding,
        has_head=shape.has_head,
        weights=DTYPES[shape.weights],
        head_weights=DTYPES[shape.weights],
        rms_norm_eps=shape.rms_norm_eps,
        attention_scale=scale,
        rope_attention_factor=shape.rope_attention_factor,
    )
