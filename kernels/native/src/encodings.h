// How activations are encoded for the kernels of a level, and the encoding itself. Included by linear.cpp and
// linear_grouped.cpp.
#pragma once
#include "packing.h"
#include "simd.h"

namespace remora::REMORA_LEVEL {
namespace {

enum class Encoding { fp32, bf16, bf16_wide, int16, int8 };

REMORA_INLINE Encoding encoding_of(Dtype weights) {
  if (weights == Dtype::fp32) return Encoding::fp32;
#if REMORA_TILES
  return Encoding::bf16;
#elif REMORA_DPBF16
  return weights == Dtype::bf16 ? Encoding::bf16 : Encoding::int8;
#elif REMORA_VNNI
  return weights == Dtype::bf16 ? Encoding::bf16_wide : Encoding::int8;
#else
  return weights == Dtype::bf16 ? Encoding::bf16_wide : Encoding::int16;
#endif
}

REMORA_INLINE int64_t encoded_bytes(Encoding encoding) {
  switch (encoding) {
    case Encoding::fp32:
    case Encoding::bf16_wide: return 4;
    case Encoding::bf16:
    case Encoding::int16: return 2;
    case Encoding::int8: return 1;
  }
  return 0;
}

// The first `count` of LANES values, zeros behind them.
REMORA_INLINE vfloat load_partial(const float* p, int64_t count) {
  float values[LANES] = {};
  __builtin_memcpy(values, p, static_cast<size_t>(count) * 4);
  return load(values);
}

template <class Visit>
REMORA_INLINE void for_each_vector(const float* x, int64_t count, const Visit& visit) {
  int64_t k = 0;
  for (; k + LANES <= count; k += LANES) visit(k, load(x + k));
  if (k < count) visit(k, load_partial(x + k, count - k));
}

// Integer values in fp32, rounded to nearest even: |x| below 2^22.
REMORA_INLINE vint round_to_int(vfloat x) {
  const vfloat magic = splat(12582912.0f);
  return __builtin_convertvector((x + magic) - magic, vint);
}

// Columns [first, first + LANES) of a row; the precisions that need no scale.
REMORA_INLINE void store_encoded(Encoding encoding, uint8_t* row, int64_t first, vfloat v) {
  if (encoding == Encoding::bf16) store_bf16(reinterpret_cast<uint16_t*>(row) + first, v);
  else if (encoding == Encoding::bf16_wide) store_as(row + 4 * first, round_bf16(v));
  else store_as(row + 4 * first, v);
}

}  // namespace
}  // namespace remora::REMORA_LEVEL
