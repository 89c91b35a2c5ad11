"""What the host emulation detects: a kernel that is wrong on a card must not pass on the processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from remora.kernels.cuda.host.emulator import HostDevice
from remora.kernels.cuda.source import CudaSource
from remora.platform.base.errors import KernelError

_KERNELS = """
#include "common.cuh"
extern "C" __global__ void divergent(int* out) {
  if (threadIdx.x < 7) __syncthreads();
  out[threadIdx.x] = 1;
}
extern "C" __global__ void two_barriers(int* out) {
  if (threadIdx.x % 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}
extern "C" __global__ void partial_warp(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 5, 1);
}
extern "C" __global__ void beyond(int* out) {
  DYNAMIC_SHARED(memory);
  memory[64 * threadIdx.x] = 0;
  out[threadIdx.x] = 1;
}
extern "C" __global__ void reverse(int* out) {
  DYNAMIC_SHARED(memory);
  int* values = reinterpret_cast<int*>(memory);
  values[threadIdx.x] = threadIdx.x + 100 * blockIdx.x;
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void race(int* out) {
  DYNAMIC_SHARED(memory);
  int* values = reinterpret_cast<int*>(memory);
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void exchange(float* out) {
  out[threadIdx.x] = warp_sum(static_cast<float>(threadIdx.x));
}
extern "C" __global__ void uninitialised(float* out) {
  DYNAMIC_SHARED(memory);
  out[threadIdx.x] = reinterpret_cast<float*>(memory)[threadIdx.x];
}
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaSource:
    """A source file of the test's own."""
    monkeypatch.setattr("remora.kernels.cuda.source.SOURCE_DIR", tmp_path)
    monkeypatch.setattr("remora.kernels.cuda.source.read_source", lambda name: (tmp_path / name).read_text())
    (tmp_path / "faulty.cu").write_text(_KERNELS)
    return CudaSource("faulty")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("divergent", "a thread has ended while others wait"),
        ("two_barriers", "different lines"),
        ("partial_warp", "a thread has ended while others wait"),
        ("beyond", "beyond the dynamic shared memory"),
    ],
)
def test_undefined_behaviour_is_reported(device: HostDevice, kernels: CudaSource, kernel: str, message: str) -> None:
    out = np.zeros(64, np.int32)
    with pytest.raises(KernelError, match=f"{kernel}.*{message}"):
        device.launch(kernels, kernel, grid=(1, 1, 1), threads=32, arguments=[device.address(out)], shared_bytes=1024)


def test_threads_of_a_block_wait_for_one_another(device: HostDevice, kernels: CudaSource) -> None:
    out = np.zeros((2, 48), np.int32)
    device.launch(kernels, "reverse", grid=(2, 1, 1), threads=48, arguments=[device.address(out)], shared_bytes=192)
    assert (out == np.add.outer([0, 100], np.arange(47, -1, -1))).all()


def test_a_missing_barrier_gives_wrong_results_at_both_ends_of_a_block(device: HostDevice, kernels: CudaSource) -> None:
    out = np.zeros((20, 48), np.int32)
    for row in out:
        device.launch(kernels, "race", grid=(1, 1, 1), threads=48, arguments=[device.address(row)], shared_bytes=192)
    wrong = (out != np.arange(47, -1, -1)).any(axis=0)
    assert wrong[:16].any()
    assert wrong[32:].any()


def test_lanes_of_a_warp_exchange_values(device: HostDevice, kernels: CudaSource) -> None:
    out = np.zeros(64, np.float32)
    device.launch(kernels, "exchange", grid=(1, 1, 1), threads=64, arguments=[device.address(out)])
    assert (out == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32).all()


def test_shared_memory_starts_as_nan(device: HostDevice, kernels: CudaSource) -> None:
    out = np.zeros(8, np.float32)
    device.launch(kernels, "uninitialised", grid=(1, 1, 1), threads=8, arguments=[device.address(out)], shared_bytes=32)
    assert np.isnan(out).all()


def test_a_wrong_number_of_arguments_is_refused(device: HostDevice, kernels: CudaSource) -> None:
    with pytest.raises(KernelError, match="another number of arguments"):
        device.launch(kernels, "exchange", grid=(1, 1, 1), threads=8, arguments=[])
