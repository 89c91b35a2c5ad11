"""Weights packed by one decoder and used by another, and the version of how they are packed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from decoder_world import LLAMA, Memory, make_geometry, make_weights, random_tokens, run

from remora.kernels.base import DecoderShape, WeightPrecision
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.native.library import LIBRARY_VARIABLE
from remora.kernels.native.packed_weights import PackedManifest, PackedWeights, max_packed_bytes, packing_id
from remora.kernels.native.weight_memory import WeightMemory
from remora.platform.base.errors import KernelError

PRECISIONS: tuple[WeightPrecision, ...] = ("fp32", "bf16", "int8", "int4")
BLOCKS = np.array([4, 0, 6, 2, 1], np.int32)
#: Of the weights below in each precision. Where one of these changes, PACKING_VERSION in packing.h is to be counted up
#: and what the test shows to be written here, with the version, in the same commit.
PACKED = {
    "version": "3",
    "fp32": "1e47c8abebfe61b8",
    "bf16": "0798ca76a4c79eff",
    "int8": "6786b7c015f1a597",
    "int4": "29b3d321f85d05cb",
}


@pytest.fixture
def own_build(native_library: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library as users have it, with the best level of this machine."""
    monkeypatch.setenv(LIBRARY_VARIABLE, str(native_library(False)))


def pack(shape: DecoderShape, weights: dict[str, torch.Tensor]) -> PackedWeights:
    memory = WeightMemory(max_packed_bytes(shape))
    decoder = NativeDecoder(shape, weights, make_geometry(shape), 2, memory=memory)
    return PackedWeights(decoder.manifest, memory)


def plain_weights(shape: DecoderShape) -> dict[str, torch.Tensor]:
    """The same on every machine and with every version of torch."""
    weights: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(make_weights(shape).items()):
        places = np.arange(tensor.numel(), dtype=np.uint64) + np.uint64(number << 20)
        values = (places * np.uint64(2654435761) % np.uint64(65521)).astype(np.float32) / np.float32(65536) - 0.5
        weights[name] = torch.from_numpy(values.astype(np.float32)).reshape(tensor.shape)
    return weights


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_packed_into_the_same_bytes_as_long_as_the_version_is_the_same(
    own_build: None, precision: WeightPrecision
) -> None:
    shape = replace(LLAMA, weights=precision, qkv_bias=True, qk_norm=True)
    packed = pack(shape, plain_weights(shape))
    found = hashlib.blake2b(packed.memory.bytes_view(packed.manifest.num_bytes), digest_size=8).hexdigest()
    version = packing_id().partition("-")[0]
    assert (version, found) == (PACKED["version"], PACKED[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_of_packed_weights_computes_the_same_bits(
    own_build: None, precision: WeightPrecision, tied: bool
) -> None:
    shape = replace(LLAMA, weights=precision, qkv_bias=True)
    geometry, tokens = make_geometry(shape), random_tokens(shape, 70)
    weights = make_weights(shape, tied=tied)
    expected = run(NativeDecoder(shape, weights, geometry, 2), Memory(geometry, 7), tokens, BLOCKS, [70])
    packed = pack(shape, weights)
    # As another process would read it.
    manifest = msgspec.json.decode(msgspec.json.encode(packed.manifest), type=PackedManifest)
    decoder = NativeDecoder(shape, PackedWeights(manifest, packed.memory), geometry, 1)
    del packed
    assert np.array_equal(run(decoder, Memory(geometry, 7), tokens, BLOCKS, [70]), expected)
    assert decoder.manifest == manifest


def test_packed_weights_of_another_shape_are_refused(own_build: None) -> None:
    shape = replace(LLAMA, weights="int8")
    packed = pack(shape, make_weights(shape))

    def adopt(shape: DecoderShape, manifest: PackedManifest, memory: WeightMemory) -> None:
        NativeDecoder(shape, PackedWeights(manifest, memory), make_geometry(shape), 1)

    with pytest.raises(KernelError, match="not those of a decoder"):
        adopt(replace(shape, vocab_size=400), packed.manifest, packed.memory)
    grouped = packed.manifest.grouped
    fewer = msgspec.structs.replace(packed.manifest, grouped=tuple(each for each in grouped if each.name[-2:] != ".o"))
    with pytest.raises(KernelError, match=r"layers\.0\.o is missing"):
        adopt(shape, fewer, packed.memory)
    with pytest.raises(KernelError, match="set twice"):
        adopt(shape, msgspec.structs.replace(packed.manifest, grouped=(*grouped, grouped[0])), packed.memory)
    large = replace(shape, num_layers=64, intermediate_size=4096)
    with pytest.raises(KernelError, match="weight store is too small"):
        adopt(large, packed.manifest, packed.memory)
    with pytest.raises(KernelError, match="weight store is too small"):
        NativeDecoder(large, make_weights(large), make_geometry(large), 1, memory=packed.memory)
