// K and V as integers: one row of head_dim values to bytes and scales, and back. kernels/reference/quantise.py says what
// the formats are and does the same operations in the same order. Level file header.
#pragma once
#include "remora.h"
#include "simd.h"

namespace remora::REMORA_LEVEL {

// Groups whose largest value is smaller become zeros: the reciprocal of their scale would overflow.
constexpr float SMALLEST_QUANTISED = 0x1p-100f;
// The largest value that rounds to a bf16 and not to infinity.
constexpr float LARGEST_BF16 = 3.3961775292304601e38f;

// Rotates a row by a Hadamard matrix, in pieces of the largest power of two that divides head_dim. Its own inverse.
REMORA_INLINE void hadamard(float* row, int head_dim) {
  const int size = head_dim & -head_dim;
  const vfloat norm = splat(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(size))));
  for (int half = 1; half < size; half *= 2) {
    if (half < LANES) {
      for (int start = 0; start < head_dim; start += 2 * half)
        for (int i = start; i < start + half; ++i) {
          const float low = row[i], high = row[i + half];
          row[i] = low + high, row[i + half] = low - high;
        }
      continue;
    }
    for (int start = 0; start < head_dim; start += 2 * half)
      for (int i = start; i < start + half; i += LANES) {
        const vfloat low = load(row + i), high = load(row + i + half);
        store(row + i, low + high), store(row + i + half, low - high);
      }
  }
  for (int i = 0; i < head_dim; i += LANES) store(row + i, load(row + i) * norm);
}

// bf16 that is not below x; x is not negative.
REMORA_INLINE uint16_t to_bf16_above(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0xffff) >> 16);
}

// `count` values (a multiple of LANES) as integers up to `largest_code`; returns their scale, NaN when a value is not
// finite.
REMORA_INLINE uint16_t quantise_group(const float* values, int count, float largest_code, int32_t* codes) {
  vfloat largest = {}, poison = {};
  for (int i = 0; i < count; i += LANES) {
    const vfloat v = load(values + i);
    largest = max(largest, abs(v));
    poison += v - v;  // NaN where v is not finite
  }
  const float top = max(largest);
  if (!(sum(poison) == 0.0f)) {
    __builtin_memset(codes, 0, static_cast<size_t>(count) * 4);
    return 0x7fc0;
  }
  const uint16_t scale = top < SMALLEST_QUANTISED ? 0 : to_bf16_above(top / largest_code);
  const vfloat inverse = splat(scale == 0 ? 0.0f : 1.0f / from_bf16(scale)), magic = splat(12582912.0f);
  for (int i = 0; i < count; i += LANES)  // to nearest even
    store_as(codes + i, __builtin_convertvector((load(values + i) * inverse + magic) - magic, vint));
  return scale;
}

REMORA_INLINE void quantise_int8(const float* values, int head_dim, uint8_t* row, uint16_t* scales) {
  int32_t codes[256];
  scales[0] = quantise_group(values, head_dim, 127.0f, codes);
  for (int i = 0; i < head_dim; ++i) row[i] = static_cast<uint8_t>(codes[i]);
}

REMORA_INLINE void quantise_int4(const float* values, int head_dim, uint8_t* row, uint16_t* scales) {
  float rotated[256];
  int32_t codes[KV_INT4_GROUP];
  __builtin_memcpy(rotated, values, static_cast<size_t>(head_dim) * 4);
  hadamard(rotated, head_dim);
  for (int start = 0; start < head_dim; start += KV_INT4_GROUP, row += KV_INT4_GROUP / 2) {
    const int count = head_dim - start < KV_INT4_GROUP ? head_dim - start : KV_INT4_GROUP;
    scales[start / KV_INT4_GROUP] = quantise_group(rotated + start, count, 7.0f, codes);
    for (int i = 0; i < count / 2; ++i) row[i] = static_cast<uint8_t>((codes[i] + 8) | (codes[i + count / 2] + 8) << 4);
  }
}

// LANES bytes as integers.
REMORA_INLINE vint widen_bytes(const int8_t* p) {
#if REMORA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  return (vint)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif REMORA_VECTOR_BYTES == 32 && defined(__AVX2__)
  return (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  vint wide;
  for (int i = 0; i < LANES; ++i) wide[i] = p[i];
  return wide;
#endif
}
REMORA_INLINE vfloat load_int8(const int8_t* p) { return __builtin_convertvector(widen_bytes(p), vfloat); }

// The rotated row that an int4 row stands for.
REMORA_INLINE void widen_int4(const uint8_t* row, const uint16_t* scales, int head_dim, float* out) {
  typedef uint8_t vnibbles __attribute__((vector_size(KV_INT4_GROUP / 2), may_alias));
  for (int start = 0; start < head_dim; start += KV_INT4_GROUP, row += KV_INT4_GROUP / 2, ++scales) {
    const int count = head_dim - start < KV_INT4_GROUP ? head_dim - start : KV_INT4_GROUP;
    int8_t codes[KV_INT4_GROUP];
    if (count == KV_INT4_GROUP) {
      const vnibbles packed = load_as<vnibbles>(row);
      store_as(codes, (packed & 15) - 8), store_as(codes + KV_INT4_GROUP / 2, (packed >> 4) - 8);
    } else {
      for (int i = 0; i < count / 2; ++i) {
        codes[i] = static_cast<int8_t>((row[i] & 15) - 8);
        codes[i + count / 2] = static_cast<int8_t>((row[i] >> 4) - 8);
      }
    }
    const vfloat scale = splat(from_bf16(*scales));
    for (int i = 0; i < count; i += LANES) store(out + start + i, load_int8(codes + i) * scale);
  }
}

// A row in any precision, from and to fp32. Returns whether the row can hold every value.
REMORA_INLINE bool encode_kv_row(Dtype dtype, const float* values, int head_dim, uint8_t* row, uint16_t* scales) {
  if (is_quantised(dtype)) {
    if (dtype == Dtype::int8) quantise_int8(values, head_dim, row, scales);
    else quantise_int4(values, head_dim, row, scales);
    bool fits = true;
    for (int64_t i = 0; i < kv_scales(dtype, head_dim); ++i) fits &= scales[i] < 0x7f80;
    return fits;
  }
  if (dtype == Dtype::fp32) __builtin_memcpy(row, values, static_cast<size_t>(head_dim) * 4);
  vint fits = splat_int(-1);
  const vfloat largest = splat(dtype == Dtype::bf16 ? LARGEST_BF16 : 3.402823466e38f);
  for (int i = 0; i < head_dim; i += LANES) {
    const vfloat v = load(values + i);
    fits &= abs(v) <= largest;
    if (dtype == Dtype::bf16) store_bf16(reinterpret_cast<uint16_t*>(row) + i, v);
  }
  int32_t lanes[LANES], all = -1;
  store_as(lanes, fits);
  for (int lane = 0; lane < LANES; ++lane) all &= lanes[lane];
  return all != 0;
}

REMORA_INLINE void decode_kv_row(Dtype dtype, const uint8_t* row, const uint16_t* scales, int head_dim, float* out) {
  if (dtype == Dtype::fp32) {
    __builtin_memcpy(out, row, static_cast<size_t>(head_dim) * 4);
  } else if (dtype == Dtype::bf16) {
    for (int i = 0; i < head_dim; i += LANES) store(out + i, load_bf16(reinterpret_cast<const uint16_t*>(row) + i));
  } else if (dtype == Dtype::int8) {
    const vfloat scale = splat(from_bf16(*scales));
    for (int i = 0; i < head_dim; i += LANES) store(out + i, load_int8(reinterpret_cast<const int8_t*>(row) + i) * scale);
  } else {
    widen_int4(row, scales, head_dim, out);
    hadamard(out, head_dim);
  }
}

}  // namespace remora::REMORA_LEVEL
