"""Which decoder runs a model. Back-ends are imported when they are asked for."""

from __future__ import annotations

import logging
from typing import Literal

from remora.kernels.base import Decoder, DecoderShape, Weights
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.errors import KernelError

Backend = Literal["auto", "native", "reference"]

_log = logging.getLogger(__name__)


def has_native_kernels() -> bool:
    """Whether "auto" is the native decoder here."""
    from remora.kernels.native.library import load_library

    try:
        load_library()
    except KernelError:
        return False
    return True


def make_decoder(
    shape: DecoderShape, weights: Weights, geometry: KVGeometry, *, num_threads: int, backend: Backend = "auto"
) -> Decoder:
    """A decoder with these weights; the caller may drop them afterwards.

    "auto" is the native one, or, with a warning, the torch reference where the native library is missing or cannot be
    loaded. Raises KernelError when a back-end that was named is not there, or the shape is not served, and StaleLibrary
    when the native library is of another version.
    """
    if backend != "reference":
        from remora.kernels.native.library import StaleLibrary, load_library

        try:
            load_library()
        except StaleLibrary:
            raise
        except KernelError as error:
            if backend == "native":
                raise
            _log.warning(
                "the torch reference runs this model, several times slower than native kernels: %s. "
                "Install a C++ compiler (g++ or clang++) and reinstall remora, or run "
                "`python -m remora.kernels.native.build`.",
                error,
            )
        else:
            from remora.kernels.native.decoder import NativeDecoder

            return NativeDecoder(shape, weights, geometry, num_threads)
    from remora.kernels.reference.decoder import TorchDecoder

    return TorchDecoder(shape, weights, geometry, num_threads)
