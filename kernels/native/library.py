"""The native library through ctypes: finding it, its structs and signatures, and its errors.

ctypes releases the GIL for the length of each call.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from remora.kernels.native.build import LIBRARY_NAME
from remora.platform.base.errors import KernelError

if TYPE_CHECKING:
    from remora.kernels.layout import BlockLayout

_INTERFACE_VERSION = 4
#: Path of another build of the library, such as the emulated one of the tests.
LIBRARY_VARIABLE = "REMORA_NATIVE_LIBRARY"
#: Forces an instruction-set level by its name (LEVELS); read by the library whenever none is given.
LEVEL_VARIABLE = "REMORA_NATIVE_ISA"
#: From the least to the best, numbered as in remora.h.
LEVELS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
#: Numbered as in remora.h.
DTYPES = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3, "int5": 4}
#: Names of kernels.base.Weights without "layers.{i}.", numbered as WeightKind in model.h.
WEIGHT_KINDS = (
    "embed",
    "lm_head",
    "final_norm",
    "rope_inv_freq",
    "input_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "o",
    "o_bias",
    "post_norm",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
)


class ShapeStruct(Structure):
    """`Shape` of step_work.h."""

    _fields_ = [
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab_size", c_int32),
        ("qk_norm", c_int32),
        ("qkv_bias", c_int32),
        ("output_bias", c_int32),
        ("mlp_bias", c_int32),
        ("tied_head", c_int32),
        ("has_embedding", c_int32),
        ("has_head", c_int32),
        ("weights", c_int32),
        ("head_weights", c_int32),
        ("rms_norm_eps", c_float),
        ("attention_scale", c_float),
        ("rope_attention_factor", c_float),
    ]


class StepStruct(Structure):
    """`Step` of remora.h."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_table", c_void_p),
        ("logit_rows", c_void_p),
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_logit_rows", c_int32),
        ("table_stride", c_int32),
        ("not_finite", c_void_p),
        ("hidden", c_void_p),
    ]


class ArenaStruct(Structure):
    """`Arena` of remora.h."""

    _fields_ = [
        ("data", c_void_p),
        ("data_bytes", c_int64),
        ("block_bytes", c_int64),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_tokens", c_int32),
        ("k_dtype", c_int32),
        ("v_dtype", c_int32),
    ]

    @classmethod
    def of(cls, layout: BlockLayout) -> ArenaStruct:
        """What blocks of this layout are, before `point_at` says where they lie."""
        k, v = layout.precisions
        return cls(
            block_bytes=layout.block_bytes,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_tokens=layout.block_tokens,
            k_dtype=DTYPES[k],
            v_dtype=DTYPES[v],
        )

    def point_at(self, data: NDArray[np.uint8]) -> None:
        self.data, self.data_bytes = data.ctypes.data, data.nbytes


_FLOATS = POINTER(c_float)
_INTS = POINTER(c_int32)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "remora_last_error": (c_char_p, []),
    "remora_interface_version": (c_int32, []),
    "remora_level_available": (c_int32, [c_int32]),
    "remora_default_level": (c_int32, []),
    "remora_packing_version": (c_int32, []),
    "remora_max_weight_bytes": (c_int64, [POINTER(ShapeStruct)]),
    "remora_decoder_create": (
        c_void_p,
        [POINTER(ShapeStruct), c_int32, c_int32, _INTS, c_void_p, c_int64, c_int32],
    ),
    "remora_decoder_destroy": (None, [c_void_p]),
    "remora_decoder_level": (c_int32, [c_void_p]),
    "remora_decoder_weight_bytes": (c_int64, [c_void_p]),
    "remora_decoder_set_weight": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int64, c_int64]),
    "remora_decoder_set_grouped": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64],
    ),
    "remora_decoder_adopt_grouped": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "remora_decoder_finish": (c_int32, [c_void_p]),
    "remora_decoder_run": (c_void_p, [c_void_p, POINTER(StepStruct), POINTER(ArenaStruct)]),
    "remora_linear": (
        c_int32,
        [
            *(c_int32, c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int32),
            *(c_int64, c_int64, c_void_p, c_int32, c_void_p),
        ],
    ),
    "remora_rms_norm": (c_int32, [c_int32, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p]),
    "remora_rope": (c_int32, [c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
    "remora_weigh_row": (c_int32, [c_int32, c_void_p, c_int64, c_float, c_float, c_void_p, c_void_p]),
    "remora_argmax_rows": (c_int32, [c_int32, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
}


class StaleLibrary(KernelError):
    """The library was built from other sources than these: nobody should find out by how slow the reference is."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"native kernels in {path} are of another version of Remora ({what}); "
            "rebuild them with `python -m remora.kernels.native.build`"
        )


class NativeLibrary:
    """The loaded library. Its functions appear under their C names on `functions`."""

    def __init__(self, path: Path) -> None:
        """Raises KernelError when the file cannot be loaded, StaleLibrary when it is of another version of Remora."""
        self.path = path
        try:
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"native kernels cannot be loaded from {path}: {error}") from error
        try:
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self.functions, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise StaleLibrary(path, str(error)) from error
        version = int(self.functions.remora_interface_version())
        if version != _INTERFACE_VERSION:
            raise StaleLibrary(path, f"interface {version}, not {_INTERFACE_VERSION}")

    def error(self) -> KernelError:
        """What the last failed call of this thread says."""
        message: bytes = self.functions.remora_last_error()
        return KernelError(message.decode())

    def check(self, status: int) -> None:
        """Raises KernelError when `status` says that the call failed."""
        if status < 0:
            raise self.error()

    def available_levels(self) -> tuple[str, ...]:
        """Levels that this build has and this processor runs, the best last."""
        return tuple(name for i, name in enumerate(LEVELS) if self.functions.remora_level_available(i))

    def level_number(self, level: str | None) -> int:
        """Number of a level for the C interface; None is the best, or what REMORA_NATIVE_ISA names.

        Raises KernelError for a level that is not available.
        """
        if level is None:
            number = int(self.functions.remora_default_level())
            self.check(number)
            return number
        if level not in self.available_levels():
            raise KernelError(f"instruction-set level {level} is not one of {', '.join(self.available_levels())}")
        return LEVELS.index(level)


_loaded: dict[Path, NativeLibrary] = {}


# Found once: resolving a path takes longer than most of the operations.
_INSTALLED_PATH = Path(__file__).resolve().parent / LIBRARY_NAME


def library_path() -> Path:
    """Where the library of this installation is, or REMORA_NATIVE_LIBRARY."""
    named = os.environ.get(LIBRARY_VARIABLE)
    return Path(named) if named else _INSTALLED_PATH


def load_library() -> NativeLibrary:
    """The library, loaded once per path and process. Raises KernelError if there is none, or as NativeLibrary does."""
    path = library_path()
    if path not in _loaded:
        if not path.exists():
            raise KernelError(f"native kernels are not built: {path} is missing")
        _loaded[path] = NativeLibrary(path)
    return _loaded[path]
