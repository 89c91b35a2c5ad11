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
      vint other, lane;
      for (int i = 0; i < LANES; ++i) other[i] = i ^ half, lane[i] = i;
      for (int i = 0; i < head_dim; i += LANES) {
        const vfloat own = load(row + i), its = __builtin_shuffle(own, other);
        store(row + i, (lane & half) != 0 ? its - own : own + its);
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

// bf16 that is not below x, which is not negative.
REMORA_INLINE uint16_t to_bf16_above(float x) {
  return static_cast<uint16_t>((bits_of(x) + 0xffff) >> 16);
}

// `count` values (a multiple of LANES) as integers -largest_code..largest_code; if SIGNED, the value farthest from zero
// becomes -largest_code, by a scale that may be negative, and none is more than largest_code - 1. Returns the scale, NaN
// when a value is not finite.
template <bool SIGNED>
REMORA_INLINE uint16_t quantise_group(const float* values, int count, int largest_code, int32_t* codes) {
  vfloat highest = {}, lowest = {}, poison = {};
  for (int i = 0; i < count; i += LANES) {
    const vfloat v = load(values + i);
    highest = max(highest, v);
    lowest = max(lowest, -v);
    poison += v - v;  // NaN where v is not finite
  }
  const float high = max(highest), low = max(lowest), top = high < low ? low : high;
  if (!(sum(poison) == 0.0f)) {
    __builtin_memset(codes, 0, static_cast<size_t>(count) * 4);
    return 0x7fc0;
  }
  uint16_t scale = top < SMALLEST_QUANTISED ? 0 : to_bf16_above(top / static_cast<float>(largest_code));
  if (SIGNED && scale != 0 && high == top) scale |= 0x8000;
  const vfloat inverse = splat(scale == 0 ? 0.0f : 1.0f / from_bf16(scale)), magic = splat(12582912.0f);
  for (int i = 0; i < count; i += LANES) {
    vint code = __builtin_convertvector((load(values + i) * inverse + magic) - magic, vint);  // to nearest even
    if (SIGNED) code = code < largest_code ? code : splat_int(largest_code - 1);
    store_as(codes + i, code);
  }
  return scale;
}

REMORA_INLINE void quantise_int8(const float* values, int head_dim, uint8_t* row, uint16_t* scales) {
  int32_t codes[256];
  scales[0] = quantise_group<false>(values, head_dim, 127, codes);
  for (int i = 0; i < head_dim; ++i) row[i] = static_cast<uint8_t>(codes[i]);
}

// int4, or int5 if FIVE.
template <bool FIVE>
REMORA_INLINE void quantise_rotated(const float* values, int head_dim, uint8_t* row, uint16_t* scales) {
  float rotated[256];
  int32_t codes[KV_INT4_GROUP];
  constexpr int OFFSET = FIVE ? 16 : 8;
  uint8_t* fifth_bits = row + head_dim / 2;
  __builtin_memcpy(rotated, values, static_cast<size_t>(head_dim) * 4);
  hadamard(rotated, head_dim);
  if (FIVE) __builtin_memset(fifth_bits, 0, static_cast<size_t>(head_dim + 63) / 64 * 8);
  for (int start = 0; start < head_dim; start += KV_INT4_GROUP, row += KV_INT4_GROUP / 2) {
    const int count = head_dim - start < KV_INT4_GROUP ? head_dim - start : KV_INT4_GROUP;
    scales[start / KV_INT4_GROUP] = quantise_group<true>(rotated + start, count, OFFSET, codes);
    for (int i = 0; i < count; ++i) codes[i] += OFFSET;
    for (int i = 0; i < count / 2; ++i)
      row[i] = static_cast<uint8_t>((codes[i] & 15) | (codes[i + count / 2] & 15) << 4);
    if (FIVE)
      for (int i = 0; i < count; ++i)
        fifth_bits[(start + i) / 8] |= static_cast<uint8_t>((codes[i] >> 4) << (start + i) % 8);
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

// 16 in the lanes of values [first, first + LANES) of a row whose fifth bit is set.
REMORA_INLINE vint widen_fifth_bits(const uint8_t* fifth_bits, int first) {
  uint32_t word = fifth_bits[first / 8];
  if (LANES > 8) word |= static_cast<uint32_t>(fifth_bits[first / 8 + 1]) << 8;
  vint mask;
  for (int lane = 0; lane < LANES; ++lane) mask[lane] = 1 << lane;
  return ((splat_int(static_cast<int32_t>(word >> first % 8)) & mask) != 0) & 16;
}

// The lower four bits of `count` codes of a group, less OFFSET.
template <uint8_t OFFSET>
REMORA_INLINE void unpack_nibbles(const uint8_t* row, int count, int8_t* codes) {
  typedef uint8_t vnibbles __attribute__((vector_size(KV_INT4_GROUP / 2), may_alias));
  if (count == KV_INT4_GROUP) {
    const vnibbles packed = load_as<vnibbles>(row);
    store_as(codes, (packed & 15) - OFFSET), store_as(codes + KV_INT4_GROUP / 2, (packed >> 4) - OFFSET);
    return;
  }
  for (int i = 0; i < count / 2; ++i) {
    codes[i] = static_cast<int8_t>((row[i] & 15) - OFFSET);
    codes[i + count / 2] = static_cast<int8_t>((row[i] >> 4) - OFFSET);
  }
}

// The rotated row that an int4 row, or an int5 row if FIVE, stands for.
template <bool FIVE>
REMORA_INLINE void widen_rotated(const uint8_t* row, const uint16_t* scales, int head_dim, float* out) {
  const uint8_t* fifth_bits = row + head_dim / 2;
  for (int start = 0; start < head_dim; start += KV_INT4_GROUP, row += KV_INT4_GROUP / 2, ++scales) {
    const int count = head_dim - start < KV_INT4_GROUP ? head_dim - start : KV_INT4_GROUP;
    int8_t codes[KV_INT4_GROUP];
    unpack_nibbles<FIVE ? 16 : 8>(row, count, codes);
    const vfloat scale = splat(from_bf16(*scales));
    for (int i = 0; i < count; i += LANES) {
      vint code = widen_bytes(codes + i);
      if (FIVE) code += widen_fifth_bits(fifth_bits, start + i);
      store(out + start + i, __builtin_convertvector(code, vfloat) * scale);
    }
  }
}

// A row in any precision, from and to fp32. Returns whether the row can hold every value.
REMORA_INLINE bool encode_kv_row(Dtype dtype, const float* values, int head_dim, uint8_t* row, uint16_t* scales) {
  if (is_quantised(dtype)) {
    if (dtype == Dtype::int8) quantise_int8(values, head_dim, row, scales);
    else if (dtype == Dtype::int5) quantise_rotated<true>(values, head_dim, row, scales);
    else quantise_rotated<false>(values, head_dim, row, scales);
    bool fits = true;
    for (int64_t i = 0; i < kv_scales(dtype, head_dim); ++i) fits &= (scales[i] & 0x7fff) < 0x7f80;
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
    if (dtype == Dtype::int5) widen_rotated<true>(row, scales, head_dim, out);
    else widen_rotated<false>(row, scales, head_dim, out);
    hadamard(out, head_dim);
  }
}

}  // namespace remora::REMORA_LEVEL
