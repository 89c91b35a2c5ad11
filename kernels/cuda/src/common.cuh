// What the kernels share. Plain CUDA C++17 without any header: NVRTC compiles it as it is, and so does a host compiler
// behind kernels/cuda/host/shim.h.
//
// Kernels are compiled without contraction (--fmad=false); where a fused multiply-add is wanted it is written as one.
// So a value has the same bits whichever copy of an unrolled loop computes it, and results can be compared bit by bit.
#pragma once

using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;

// bfloat16 as its bits.
struct Bf16 {
  uint16 bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Bf16 value) { return __uint_as_float(static_cast<uint32>(value.bits) << 16); }

// Rounds to nearest even; NaN stays NaN.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ Bf16 from_float<Bf16>(float value) {
  const uint32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16>((bits >> 16) | 0x40u)};
  return {static_cast<uint16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Four consecutive values; the address is a multiple of 16 bytes.
__device__ __forceinline__ float4 load_four(const float* values) { return *reinterpret_cast<const float4*>(values); }

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

// Sums over the 32 lanes of a full warp, in an order that depends on nothing.
__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}
__device__ __forceinline__ uint32 warp_max(uint32 value) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

// One type or another; the standard's headers are not there.
template <bool CONDITION, class A, class B>
struct Pick {
  using Type = A;
};
template <class A, class B>
struct Pick<false, A, B> {
  using Type = B;
};

// Where K and V of one layer lie: in bytes from the start of the arena. Block-major and layer-major arenas differ in
// these numbers only. side: 0 is K, 1 is V.
struct Place {
  uint8* data;
  int64 layer_offset, block_stride, side_stride, k_head_stride, v_head_stride;

  // The first row of a head.
  __device__ __forceinline__ uint8* head(int block, int side, int head) const {
    const int64 head_stride = side == 0 ? k_head_stride : v_head_stride;
    return data + layer_offset + block * block_stride + side * side_stride + head * head_stride;
  }
};

// A file that calls this first declares the dynamic shared memory of a kernel, 16-byte aligned, as `name`.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) uint8 name[]
#endif
