"""Every CUDA source becomes machine code for the cards we name. Needs NVRTC, no GPU."""

from __future__ import annotations

import pytest

from remora.kernels.cuda import compile as cuda_compile
from remora.kernels.cuda.source import CudaSource, source_names
from remora.platform.base.errors import KernelError


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> tuple[int, int]:
    pytest.importorskip("cupy_backends", reason="needs cupy (extra cuda-compile)")
    try:
        return cuda_compile.toolkit_version()
    except KernelError as error:
        pytest.skip(f"needs NVRTC: {error}")


#: Every source, every head size, every tile, every format of K and of V and every type at least once.
_ATTENTION = [
    (64, 2, "Int8Rows", "Int4Rows", "Bf16"),
    (80, 4, "Fp32Rows", "Fp32Rows", "float"),
    (80, 8, "Int4Rows", "Int8Rows", "float"),
    (96, 8, "Bf16Rows", "Bf16Rows", "float"),
    (96, 4, "Int5Rows", "Int5Rows", "Bf16"),
    (128, 16, "Bf16Rows", "Bf16Rows", "Bf16"),
    (128, 16, "Int8Rows", "Int8Rows", "Bf16"),
]
_STORED = {"HEAD_DIM": 96, "K_FORMAT": "Int8Rows", "V_FORMAT": "Int4Rows"}
_SOURCES = [
    *(CudaSource.of(name) for name in ("checksum", "copy_blocks", "zero_blocks")),
    CudaSource.of("rms_norm", VALUE_TYPE="Bf16"),
    CudaSource.of("merge_attention", HEAD_DIM=80, VALUE_TYPE="Bf16"),
    CudaSource.of("store_kv", VALUE_TYPE="Bf16", **_STORED),
    CudaSource.of("store_kv", HEAD_DIM=80, K_FORMAT="Bf16Rows", V_FORMAT="Fp32Rows", VALUE_TYPE="float"),
    CudaSource.of("store_kv", HEAD_DIM=128, K_FORMAT="Int5Rows", V_FORMAT="Int5Rows", VALUE_TYPE="Bf16"),
    CudaSource.of("move_slots", **_STORED),
    CudaSource.of("reencode_blocks", HEAD_DIM=80, FROM="Bf16Rows", TO="Int4Rows"),
    CudaSource.of("reencode_blocks", HEAD_DIM=128, FROM="Int4Rows", TO="Int8Rows"),
    *(
        CudaSource.of("paged_attention", HEAD_DIM=head_dim, ROWS=rows, K_FORMAT=k, V_FORMAT=v, VALUE_TYPE=value)
        for head_dim, rows, k, v, value in _ATTENTION
    ),
]


def _is_quick(source: CudaSource) -> bool:
    """The attention in one variant for each architecture and in all of them for one: compiling it takes a second."""
    return source.name != "paged_attention" or ("ROWS", "2") in source.macros


@pytest.mark.parametrize(
    ("source", "architecture"),
    [
        (source, architecture)
        for source in _SOURCES
        for architecture in cuda_compile.ARCHITECTURES
        if architecture == "sm_90" or _is_quick(source)
    ],
    ids=str,
)
def test_a_source_becomes_a_cubin_with_its_kernels(source: CudaSource, architecture: str) -> None:
    if architecture not in cuda_compile.supported_architectures():
        pytest.skip(f"CUDA {cuda_compile.toolkit_version()} does not know {architecture}")
    cubin = cuda_compile.compile_cubin(source, architecture)
    assert cubin[:4] == b"\x7fELF"
    assert source.kernel_names()
    assert all(name.encode() in cubin for name in source.kernel_names())


def test_no_source_is_left_out() -> None:
    assert {source.name for source in _SOURCES} == set(source_names())
    assert {source.name for source in cuda_compile.all_variants()} == set(source_names())


def test_an_architecture_that_the_toolkit_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match="sm_35"):
        cuda_compile.compile_cubin(CudaSource.of("checksum"), "sm_35")


def test_the_compilers_words_are_in_the_error() -> None:
    with pytest.raises(KernelError, match="HEAD_DIM"):
        cuda_compile.compile_cubin(CudaSource.of("move_slots", K_FORMAT="Int8Rows", V_FORMAT="Int8Rows"), "sm_90")


def test_a_source_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"no CUDA source flash\.cu"):
        CudaSource.of("flash")
