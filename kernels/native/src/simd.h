// Vectors of one instruction-set level, on the compiler's vector extension: the same source serves every level.
//
// Level files (all .cpp here but those that build.py calls shared) are compiled once per level, with
// REMORA_LEVEL naming the level and the flags of build.py, and put everything in `namespace remora::REMORA_LEVEL`, with
// internal linkage where it is not called from another file. They call no std:: templates: the linker could keep the
// copy that was compiled for a better CPU than the one it runs on.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "remora.h"

#ifndef REMORA_LEVEL
#error "simd.h is for level files"
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if REMORA_VECTOR_BYTES != 16 && REMORA_VECTOR_BYTES != 32 && REMORA_VECTOR_BYTES != 64
#error "REMORA_VECTOR_BYTES must be 16, 32 or 64"
#endif

#define REMORA_INLINE static inline __attribute__((always_inline))
#define REMORA_INLINE_MEMBER inline __attribute__((always_inline))

namespace remora::REMORA_LEVEL {

constexpr int LANES = REMORA_VECTOR_BYTES / 4;

typedef float vfloat __attribute__((vector_size(REMORA_VECTOR_BYTES), may_alias));
typedef int32_t vint __attribute__((vector_size(REMORA_VECTOR_BYTES), may_alias));
typedef uint32_t vuint __attribute__((vector_size(REMORA_VECTOR_BYTES), may_alias));
typedef int16_t vshort __attribute__((vector_size(REMORA_VECTOR_BYTES), may_alias));
typedef int8_t vchar __attribute__((vector_size(REMORA_VECTOR_BYTES), may_alias));
typedef uint16_t vhalf_bits __attribute__((vector_size(REMORA_VECTOR_BYTES / 2), may_alias));

template <class V, class T>
REMORA_INLINE V load_as(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class T, class V>
REMORA_INLINE void store_as(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

REMORA_INLINE vfloat load(const float* p) { return load_as<vfloat>(p); }
REMORA_INLINE void store(float* p, vfloat v) { store_as(p, v); }
REMORA_INLINE vfloat splat(float x) { return x - vfloat{}; }  // x - (+0) is x, for -0 as well
REMORA_INLINE vint splat_int(int32_t x) { return x - vint{}; }

// a * b + c: rounded once where the level has FMA, else twice. Compiled with -ffp-contract=off, so that no other
// product is fused and every variant of a kernel rounds alike.
REMORA_INLINE vfloat fma(vfloat a, vfloat b, vfloat c) {
#if REMORA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif REMORA_VECTOR_BYTES == 64 && defined(__FMA__)  // emulation of 512-bit levels
  typedef float half __attribute__((vector_size(32), may_alias));
  half x[2], y[2], z[2];
  __builtin_memcpy(x, &a, 64), __builtin_memcpy(y, &b, 64), __builtin_memcpy(z, &c, 64);
  for (int i = 0; i < 2; ++i) z[i] = (half)_mm256_fmadd_ps((__m256)x[i], (__m256)y[i], (__m256)z[i]);
  __builtin_memcpy(&c, z, 64);
  return c;
#elif REMORA_VECTOR_BYTES == 32 && defined(__FMA__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

REMORA_INLINE vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }
REMORA_INLINE vfloat min(vfloat a, vfloat b) { return a < b ? a : b; }
REMORA_INLINE vfloat abs(vfloat a) { return (vfloat)((vuint)a & 0x7fffffffu); }

// Lane i of the result is lane (i + BY) % LANES.
template <int BY, class V>
REMORA_INLINE V rotate_lanes(V v) {
#if REMORA_VECTOR_BYTES == 64
  return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3, BY + 4, BY + 5, BY + 6, BY + 7, BY + 8, BY + 9,
                                 BY + 10, BY + 11, BY + 12, BY + 13, BY + 14, BY + 15);
#elif REMORA_VECTOR_BYTES == 32
  return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3, BY + 4, BY + 5, BY + 6, BY + 7);
#else
  return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3);
#endif
}

// All lanes joined in a fixed tree order: halves first.
template <int HALF = LANES / 2, class V, class Join>
REMORA_INLINE auto fold(V v, const Join& join) {
  const V joined = join(v, rotate_lanes<HALF>(v));
  if constexpr (HALF > 1) return fold<HALF / 2>(joined, join);
  else return joined[0];
}
REMORA_INLINE float sum(vfloat v) {
  return fold(v, [](vfloat a, vfloat b) { return a + b; });
}
REMORA_INLINE int32_t sum(vint v) {
  return fold(v, [](vint a, vint b) { return a + b; });
}
REMORA_INLINE float max(vfloat v) {
  return fold(v, [](vfloat a, vfloat b) { return max(a, b); });
}

REMORA_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
REMORA_INLINE float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// bf16 is the upper half of fp32; rounding is to nearest even, NaN stays NaN.
REMORA_INLINE float from_bf16(uint16_t x) {
  return float_of(static_cast<uint32_t>(x) << 16);
}
REMORA_INLINE uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
REMORA_INLINE vfloat load_bf16(const uint16_t* p) {
  const vuint wide = __builtin_convertvector(load_as<vhalf_bits>(p), vuint);
  return (vfloat)(wide << 16);
}
// Upper 16 bits of each lane hold the bf16, the lower 16 are zero.
REMORA_INLINE vuint round_bf16(vfloat v) {
  const vuint bits = (vuint)v;
  const vuint rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (v == v ? rounded : (bits | 0x400000u)) & 0xffff0000u;
}
REMORA_INLINE void store_bf16(uint16_t* p, vfloat v) {
  store_as(p, __builtin_convertvector(round_bf16(v) >> 16, vhalf_bits));
}

// Within 2 units in the last place over the whole range; 0 below -87.3, infinity above 88.7.
REMORA_INLINE vfloat exp(vfloat x) {
  const vfloat clamped = max(min(x, splat(89.0f)), splat(-88.0f));
  const vfloat shifted = fma(clamped, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23 rounds to an integer
  const vfloat n = shifted - splat(12582912.0f);
  vfloat r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vfloat p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
#if REMORA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  const vfloat result = (vfloat)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  // 2^n in two factors, so that neither overflows
  const vint whole = __builtin_convertvector(n, vint);
  const vint low = whole >> 1, high = whole - low;
  const vfloat scale_low = (vfloat)((low + 127) << 23), scale_high = (vfloat)((high + 127) << 23);
  const vfloat result = p * scale_low * scale_high;
#endif
  const vfloat underflowed = x < splat(-87.3f) ? vfloat{} : result;
  return x == x ? underflowed : x;
}

}  // namespace remora::REMORA_LEVEL
