"""Packing a model's weights, tensor by tensor, into the memory of a native decoder. The only part of it with torch."""

from __future__ import annotations

import torch

from remora.kernels.base import DecoderShape, Weights
from remora.kernels.grouped import GroupedTensor, group_rows
from remora.kernels.native.library import DTYPES, NativeLibrary
from remora.kernels.native.packed_weights import GroupedLayer, PackedManifest, place_of

_LINEAR_KINDS = frozenset({"lm_head", "qkv", "o", "gate_up", "down"})
_TORCH_DTYPES = {torch.float32: DTYPES["fp32"], torch.bfloat16: DTYPES["bf16"]}


def pack_weights(
    library: NativeLibrary, handle: int, shape: DecoderShape, weights: Weights, *, tied_head: bool
) -> PackedManifest:
    """Packs all weights; they may be dropped afterwards. Raises KernelError for weights that do not fit the shape."""
    packer = _Packer(library, handle, shape)
    for name, tensor in weights.items():
        packer.set_weight(name, tensor)
    if shape.has_embedding and shape.has_head and "lm_head" not in weights and not tied_head:
        packer.set_weight("lm_head", weights["embed"])
    library.check(library.functions.remora_decoder_finish(handle))
    rope_inv_freq = weights["rope_inv_freq"]
    assert isinstance(rope_inv_freq, torch.Tensor)
    return PackedManifest(
        num_bytes=int(library.functions.remora_decoder_weight_bytes(handle)),
        tied_head=tied_head,
        rope_inv_freq=tuple(rope_inv_freq.to(torch.float32).tolist()),
        grouped=tuple(packer.grouped),
    )


class _Packer:
    def __init__(self, library: NativeLibrary, handle: int, shape: DecoderShape) -> None:
        self._library = library
        self._functions = library.functions
        self._handle = handle
        self._shape = shape
        self.grouped: list[GroupedLayer] = []

    def set_weight(self, name: str, tensor: torch.Tensor | GroupedTensor) -> None:
        place = place_of(name)
        if isinstance(tensor, GroupedTensor):
            self._set_grouped(name, tensor)
            return
        if self._shape.weights in ("int8", "int4") and place.kind in _LINEAR_KINDS:
            self._set_grouped(name, group_rows(tensor.detach(), self._shape.weights))
            return
        source = tensor.detach()
        if source.dtype not in _TORCH_DTYPES:
            source = source.to(torch.float32)
        source = source.contiguous()
        rows = source.shape[0] if source.ndim == 2 else 1
        self._library.check(
            self._functions.remora_decoder_set_weight(
                self._handle,
                place.kind_number,
                place.layer,
                source.data_ptr(),
                _TORCH_DTYPES[source.dtype],
                rows,
                source.shape[-1],
            )
        )

    def _set_grouped(self, name: str, tensor: GroupedTensor) -> None:
        place = place_of(name)
        codes, scale = tensor.codes_OI.contiguous(), tensor.scale_OG.contiguous()
        minimum = None if tensor.minimum_OG is None else tensor.minimum_OG.contiguous()
        self._library.check(
            self._functions.remora_decoder_set_grouped(
                *(self._handle, place.kind_number, place.layer, codes.data_ptr(), scale.data_ptr()),
                None if minimum is None else minimum.data_ptr(),
                DTYPES[tensor.precision],
                *tensor.shape,
            )
        )
        self.grouped.append(
            GroupedLayer(name=name, precision=tensor.precision, has_minimum=tensor.minimum_OG is not None)
        )
