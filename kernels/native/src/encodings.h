// How activations are encoded for the kernels of a level, and the encoding itself. Included by linear.cpp alone.
#pragma once
#include "packing.h"
#include "simd.h"

namespace remora::REMORA_LEVEL {
namespace {

enum class Encoding { fp32, bf16, bf16_wide, int8, uint8, int16 };

Encoding encoding_of(Dtype weights) {
  if (weights == Dtype::fp32) return Encoding::fp32;
#if REMORA_TILES
  return weights == Dtype::bf16 ? Encoding::bf16 : Encoding::int8;
#elif REMORA_DPBF16
  return weights == Dtype::bf16 ? Encoding::bf16 : Encoding::uint8;
#elif REMORA_VNNI
  return weights == Dtype::bf16 ? Encoding::bf16_wide : Encoding::uint8;
#else
  return weights == Dtype::bf16 ? Encoding::bf16_wide : Encoding::int16;
#endif
}

int64_t encoded_bytes(Encoding encoding) {
  switch (encoding) {
    case Encoding::fp32:
    case Encoding::bf16_wide: return 4;
    case Encoding::bf16:
    case Encoding::int16: return 2;
    default: return 1;
  }
}

// The first `count` of LANES values, zeros behind them.
vfloat load_partial(const float* p, int64_t count) {
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
vint round_to_int(vfloat x) {
  const vfloat magic = splat(12582912.0f);
  return __builtin_convertvector((x + magic) - magic, vint);
}

// One group of a row: `count` values into `out`.
void encode_group(Encoding encoding, const float* x, int64_t count, uint8_t* out, float* scale) {
  vfloat largest = {}, poison = {};
  for_each_vector(x, count, [&](int64_t, vfloat v) {
    largest = max(largest, abs(v));
    poison += v - v;  // NaN where v is not finite
  });
  const float group_scale = max(largest) / 127.0f;
  const vfloat inverse = splat(group_scale > 0.0f ? 1.0f / group_scale : 0.0f);
  *scale = group_scale + sum(poison);
  for_each_vector(x, count, [&](int64_t k, vfloat v) {
    int32_t values[LANES];
    store_as(values, round_to_int(v * inverse));
    for (int i = 0; i < LANES; ++i) {
      const int32_t value = values[i];
      if (encoding == Encoding::int8) {
        out[k + i] = static_cast<uint8_t>(value);
      } else if (encoding == Encoding::uint8) {
        out[k + i] = static_cast<uint8_t>(value + 128);
      } else {
        const int64_t position = (k + i) % 4;
        const int64_t place = (k + i) - position + (position % 2) * 2 + position / 2;
        reinterpret_cast<int16_t*>(out)[place] = static_cast<int16_t>(value);
      }
    }
  });
}

void encode_int8(Encoding encoding, const float* x, int64_t num_in, uint8_t* out, float* scales) {
  for (int64_t k = 0; k < num_in; k += INT8_GROUP) {
    const int64_t count = num_in - k < INT8_GROUP ? num_in - k : INT8_GROUP;
    encode_group(encoding, x + k, count, out + k * encoded_bytes(encoding), scales + k / INT8_GROUP);
  }
}

// Columns [first, first + LANES) of a row; the precisions that need no scale.
REMORA_INLINE void store_encoded(Encoding encoding, uint8_t* row, int64_t first, vfloat v) {
  if (encoding == Encoding::bf16) store_bf16(reinterpret_cast<uint16_t*>(row) + first, v);
  else if (encoding == Encoding::bf16_wide) store_as(row + 4 * first, round_bf16(v));
  else store_as(row + 4 * first, v);
}

}  // namespace
}  // namespace remora::REMORA_LEVEL
