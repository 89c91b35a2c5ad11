// Inner loops of the portable attention: lanes run over head_dim, so that K and V are read as they lie in a block.
// Level file header. Shapes: rows are query rows, tokens are rows of K or V.
#pragma once
#include "quantise.h"
#include "simd.h"

namespace remora::REMORA_LEVEL {

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

// Query rows per pass: as many as leave room for 4 accumulators each in the registers.
constexpr int MAX_PASS_ROWS = LANES == 16 ? 6 : 3;

// 16-bit values, each in the lower half of a lane.
REMORA_INLINE vuint load_u16(const uint16_t* p) {
#if REMORA_VECTOR_BYTES == 64 && defined(__AVX512F__)  // gcc 12 makes many of the conversion below
  return (vuint)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return __builtin_convertvector(load_as<vhalf_bits>(p), vuint);
#endif
}

template <class T>
constexpr int LINE_VALUES = 64 / static_cast<int>(sizeof(T));

// How rows of T become vectors. A load of bf16 holds two values in each 32-bit lane; on short vectors it is cheapest to
// take the even ones as one vector and the odd ones as the next, so dims are handled in that order (`arrange`).
template <class T>
constexpr int VECTORS_PER_LOAD = sizeof(T) == 2 && LANES < 16 ? 2 : 1;

// Vector `part` of the VECTORS_PER_LOAD vectors at p.
REMORA_INLINE vfloat load_part(const float* p, int) { return load(p); }
REMORA_INLINE vfloat load_part(const uint16_t* p, int part) {
#if REMORA_VECTOR_BYTES == 64
  (void)part;
  return (vfloat)(load_u16(p) << 16);
#else
  const vuint both = load_as<vuint>(p);
  return (vfloat)(part == 0 ? both << 16 : both & 0xffff0000u);
#endif
}

REMORA_INLINE vfloat load_part(const int8_t* p, int) { return load_int8(p); }

// Dims of one row into the order of the vectors of T, and back.
template <class T>
REMORA_INLINE void arrange(const float* row, int head_dim, float* target) {
  constexpr int PARTS = VECTORS_PER_LOAD<T>;
  for (int d = 0; d < head_dim; d += PARTS * LANES)
    for (int part = 0; part < PARTS; ++part)
      for (int i = 0; i < LANES; ++i) target[d + part * LANES + i] = row[d + i * PARTS + part];
}
template <class T>
REMORA_INLINE void restore(float* row, int head_dim) {
  constexpr int PARTS = VECTORS_PER_LOAD<T>;
  if (PARTS == 1) return;
  for (int d = 0; d < head_dim; d += PARTS * LANES) {
    float group[PARTS * LANES];
    for (int part = 0; part < PARTS; ++part)
      for (int i = 0; i < LANES; ++i) group[i * PARTS + part] = row[d + part * LANES + i];
    __builtin_memcpy(row + d, group, sizeof group);
  }
}

// 2^x for x <= 0 (also -infinity), relative error below 2e-7; values below 2^-126 become 2^-126. NaN stays NaN.
REMORA_INLINE vfloat exp2_of_negative(vfloat x) {
  const vfloat clamped = max(splat(-126.0f), x);
  const vfloat shifted = clamped + splat(12582912.0f);  // 1.5 * 2^23 rounds to an integer
  const vfloat r = clamped - (shifted - splat(12582912.0f));
  vfloat p = splat(1.53533573e-4f);
  p = fma(p, r, splat(1.33988762e-3f));
  p = fma(p, r, splat(9.61843785e-3f));
  p = fma(p, r, splat(5.55033237e-2f));
  p = fma(p, r, splat(2.40226477e-1f));
  p = fma(p, r, splat(6.93147182e-1f));
  p = fma(p, r, splat(1.0f));
  const vint exponent = ((vint)shifted - 0x4b400000 + 127) << 23;
  return p * (vfloat)exponent;
}

#if REMORA_VECTOR_BYTES == 64
// rows[i][j] ↔ rows[j][i] of a 16 x 16 matrix, by exchange of halves, quarters, ...
template <int STEP>
REMORA_INLINE void exchange(vuint* rows) {
  vuint low, high;
  for (int lane = 0; lane < 16; ++lane) {
    const bool odd = (lane & STEP) != 0;
    low[lane] = static_cast<uint32_t>(odd ? 16 + lane - STEP : lane);
    high[lane] = static_cast<uint32_t>(odd ? 16 + lane : lane + STEP);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if ((i & STEP) != 0) continue;
    const vuint a = rows[i], b = rows[i + STEP];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + STEP] = __builtin_shuffle(a, b, high);
  }
}

REMORA_INLINE void transpose(vuint* rows) {
  exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}
#endif

typedef float vquad __attribute__((vector_size(16), may_alias));

// Lanes 0..3 plus lanes 4..7 and so on.
REMORA_INLINE vquad fold(vfloat v) {
  vquad part[LANES / 4];
  __builtin_memcpy(part, &v, sizeof v);
#if REMORA_VECTOR_BYTES == 64
  return (part[0] + part[2]) + (part[1] + part[3]);
#elif REMORA_VECTOR_BYTES == 32
  return part[0] + part[1];
#else
  return part[0];
#endif
}

// Writes the lane sums of four vectors side by side: ((l0 + l2) + (l1 + l3)) of each after fold().
REMORA_INLINE void store_sums(float* target, vfloat a, vfloat b, vfloat c, vfloat d) {
  const vquad x = fold(a), y = fold(b), z = fold(c), w = fold(d);
  const vquad xy = __builtin_shufflevector(x, y, 0, 4, 1, 5) + __builtin_shufflevector(x, y, 2, 6, 3, 7);
  const vquad zw = __builtin_shufflevector(z, w, 0, 4, 1, 5) + __builtin_shufflevector(z, w, 2, 6, 3, 7);
  const vquad sums = __builtin_shufflevector(xy, zw, 0, 1, 4, 5) + __builtin_shufflevector(xy, zw, 2, 3, 6, 7);
  __builtin_memcpy(target, &sums, sizeof sums);
}

// scores[row][token] = q[row] · k[token], with q in the order of `arrange<T>`, for ROWS rows and `num_tokens` tokens (a
// multiple of 4). `next` is what will be read after k, or k itself; its lines are fetched along the way.
template <class T, int ROWS>
static void score_pass(const float* q, const T* k, const T* next, int head_dim, int num_tokens, float* scores,
                       int64_t scores_stride) {
  const bool fetches = next != k;
  for (int token = 0; token < num_tokens; token += 4, k += 4 * head_dim, next += 4 * head_dim) {
    if (fetches)
      for (int d = 0; d < 4 * head_dim; d += LINE_VALUES<T>) __builtin_prefetch(next + d);
    vfloat sums[ROWS][4] = {};
    for (int d = 0; d < head_dim; d += VECTORS_PER_LOAD<T> * LANES) {
#pragma GCC unroll 2
      for (int part = 0; part < VECTORS_PER_LOAD<T>; ++part) {
        const float* query = q + d + part * LANES;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const vfloat key = load_part(k + j * head_dim + d, part);
#pragma GCC unroll 8
          for (int row = 0; row < ROWS; ++row) sums[row][j] = fma(load(query + row * head_dim), key, sums[row][j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
      store_sums(scores + row * scores_stride + token, sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
  }
}

// out[row][d..] += Σ p[row][token] * v[token][d..] in token order, with out in the order of `arrange<T>`, for ROWS rows
// and VECTORS * LANES dims.
template <class T, int ROWS, int VECTORS>
static void value_pass(const float* p, int64_t p_stride, const T* v, const T* next, int head_dim, int num_tokens,
                       float* out) {
  vfloat sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) sums[row][i] = load(out + row * head_dim + i * LANES);
  const bool fetches = next != v;
  for (int token = 0; token < num_tokens; ++token, v += head_dim, next += head_dim) {
    if (fetches)
      for (int i = 0; i < VECTORS * LANES; i += LINE_VALUES<T>) __builtin_prefetch(next + i);
    vfloat value[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) {
      constexpr int PARTS = VECTORS_PER_LOAD<T>;
      value[i] = load_part(v + i / PARTS * PARTS * LANES, i % PARTS);
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const vfloat weight = splat(p[row * p_stride + token]);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) sums[row][i] = fma(weight, value[i], sums[row][i]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) store(out + row * head_dim + i * LANES, sums[row][i]);
}

template <class T, int ROWS>
static void value_rows(const float* p, int64_t p_stride, const T* v, const T* next, int head_dim, int num_tokens,
                       float* out) {
  constexpr int VECTORS = ROWS == 1 ? 8 : 4;  // enough independent sums to hide the latency of an FMA
  int d = 0;
  for (; d + VECTORS * LANES <= head_dim; d += VECTORS * LANES)
    value_pass<T, ROWS, VECTORS>(p, p_stride, v + d, next + d, head_dim, num_tokens, out + d);
  for (; d < head_dim; d += VECTORS_PER_LOAD<T> * LANES)
    value_pass<T, ROWS, VECTORS_PER_LOAD<T>>(p, p_stride, v + d, next + d, head_dim, num_tokens, out + d);
}

// Rows of the next pass when `rows` are left: passes of equal size, none above MAX_PASS_ROWS.
REMORA_INLINE int pass_rows(int rows) {
  const int passes = (rows + MAX_PASS_ROWS - 1) / MAX_PASS_ROWS;
  return (rows + passes - 1) / passes;
}

// score_pass for any number of rows; the arithmetic of a row is the same whatever pass it is in.
template <class T>
static void score_block(const float* q, int rows, const T* k, const T* next, int head_dim, int num_tokens,
                        float* scores, int64_t stride) {
  while (rows > 0) {
    const int count = pass_rows(rows);
    switch (count) {
      case 1: score_pass<T, 1>(q, k, next, head_dim, num_tokens, scores, stride); break;
      case 2: score_pass<T, 2>(q, k, next, head_dim, num_tokens, scores, stride); break;
#if REMORA_VECTOR_BYTES == 64
      case 3: score_pass<T, 3>(q, k, next, head_dim, num_tokens, scores, stride); break;
      case 4: score_pass<T, 4>(q, k, next, head_dim, num_tokens, scores, stride); break;
      case 5: score_pass<T, 5>(q, k, next, head_dim, num_tokens, scores, stride); break;
#endif
      default: score_pass<T, MAX_PASS_ROWS>(q, k, next, head_dim, num_tokens, scores, stride);
    }
    next = k;  // fetched once
    rows -= count, q += count * head_dim, scores += count * stride;
  }
}

template <class T>
static void value_block(const float* p, int64_t stride, int rows, const T* v, const T* next, int head_dim,
                        int num_tokens, float* out) {
  while (rows > 0) {
    const int count = pass_rows(rows);
    switch (count) {
      case 1: value_rows<T, 1>(p, stride, v, next, head_dim, num_tokens, out); break;
      case 2: value_rows<T, 2>(p, stride, v, next, head_dim, num_tokens, out); break;
#if REMORA_VECTOR_BYTES == 64
      case 3: value_rows<T, 3>(p, stride, v, next, head_dim, num_tokens, out); break;
      case 4: value_rows<T, 4>(p, stride, v, next, head_dim, num_tokens, out); break;
      case 5: value_rows<T, 5>(p, stride, v, next, head_dim, num_tokens, out); break;
#endif
      default: value_rows<T, MAX_PASS_ROWS>(p, stride, v, next, head_dim, num_tokens, out);
    }
    next = v;
    rows -= count, p += count * stride, out += count * head_dim;
  }
}

}  // namespace remora::REMORA_LEVEL
