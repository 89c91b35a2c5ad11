"""Machine code from CUDA sources by NVRTC, with or without a GPU. `python -m remora.kernels.cuda.compile` compiles all.

NVRTC is taken through cupy_backends (extra `gpu`, or `cuda-compile` where no CUDA toolkit is installed).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

from remora.kernels.cuda.source import KV_FORMATS, VALUE_TYPES, CudaSource
from remora.platform.base.errors import KernelError

#: sm_80: A100, sm_90: H100 and H200, sm_100: B200.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
#: Head sizes that are compiled ahead and tested; the sources take any multiple of 16 up to 128.
HEAD_DIMS = (64, 80, 96, 128)
TILE_ROWS = (2, 4, 8, 16)
#: Of K and V. Other pairs with int5 are compiled when a model asks for them.
_KV_PAIRS = (
    ("Fp32Rows", "Fp32Rows"),
    *itertools.product(("Bf16Rows", "Int8Rows", "Int4Rows"), repeat=2),
    ("Int5Rows", "Int4Rows"),
)

# --fmad=false: where a fused multiply-add is wanted, the sources say so (common.cuh).
COMPILE_OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "-default-device")


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelError(f"NVRTC is missing (pip install 'remora[cuda-compile]'): {error}") from None
    return nvrtc


def toolkit_version() -> tuple[int, int]:
    """Major and minor version of NVRTC. Raises KernelError when there is none."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def supported_architectures() -> tuple[str, ...]:
    """What this NVRTC can compile for, e.g. ("sm_75", "sm_80", ...)."""
    return tuple(f"sm_{number}" for number in sorted(_nvrtc().getSupportedArchs()))


def compile_cubin(source: CudaSource, architecture: str) -> bytes:
    """A cubin of the variant. Raises KernelError with the compiler's log, or for an architecture it does not know."""
    nvrtc = _nvrtc()
    if architecture not in supported_architectures():
        version = ".".join(map(str, toolkit_version()))
        raise KernelError(f"CUDA {version} does not compile for {architecture}, only {supported_architectures()}")
    headers = source.headers()
    contents, names = ([text.encode() for text in texts] for texts in (headers.values(), headers))
    program = nvrtc.createProgram(source.text(), source.path.name, contents, names)
    try:
        try:
            nvrtc.compileProgram(
                program, [*COMPILE_OPTIONS, f"--gpu-architecture={architecture}", *source.macro_options()]
            )
        except nvrtc.NVRTCError:
            log = nvrtc.getProgramLog(program)
            raise KernelError(f"{source} does not compile for {architecture}:\n{log}") from None
        cubin: bytes = nvrtc.getCUBIN(program)
        return cubin
    finally:
        nvrtc.destroyProgram(program)


def all_variants() -> Iterator[CudaSource]:
    """Every variant that a model of a supported shape can ask for, but for rare pairs of K and V."""
    yield CudaSource.of("checksum")
    yield CudaSource.of("copy_blocks")
    yield CudaSource.of("zero_blocks")
    for value in VALUE_TYPES.values():
        yield CudaSource.of("rms_norm", VALUE_TYPE=value)
        for head_dim in HEAD_DIMS:
            yield CudaSource.of("merge_attention", HEAD_DIM=head_dim, VALUE_TYPE=value)
            for k, v in _KV_PAIRS:
                macros: dict[str, str | int] = {"HEAD_DIM": head_dim, "K_FORMAT": k, "V_FORMAT": v, "VALUE_TYPE": value}
                yield CudaSource.of("store_kv", **macros)
                for rows in TILE_ROWS:
                    yield CudaSource.of("paged_attention", ROWS=rows, **macros)
    for head_dim in HEAD_DIMS:
        for k, v in _KV_PAIRS:
            yield CudaSource.of("move_slots", HEAD_DIM=head_dim, K_FORMAT=k, V_FORMAT=v)
        for source, target in itertools.product(KV_FORMATS.values(), repeat=2):
            yield CudaSource.of("reencode_blocks", HEAD_DIM=head_dim, FROM=source, TO=target)


def main() -> None:
    """Compiles all variants for all architectures that this NVRTC knows, and says what it did."""
    major, minor = toolkit_version()
    known = supported_architectures()
    sys.stdout.write(f"NVRTC {major}.{minor} compiles for {', '.join(known)}\n")
    for architecture in ARCHITECTURES:
        if architecture not in known:
            sys.stdout.write(f"{architecture}: not supported by this toolkit\n")
            continue
        sizes = [len(compile_cubin(source, architecture)) for source in all_variants()]
        sys.stdout.write(f"{architecture}: {len(sizes)} variants, {sum(sizes)} bytes\n")


if __name__ == "__main__":
    main()
