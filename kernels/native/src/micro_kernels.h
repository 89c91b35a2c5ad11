// The inner loops of linear.cpp on vectors: MR rows against NB blocks of 16 columns, all of k, accumulators in
// registers.
//
// One line of a block is 64 bytes: its 16 columns at one k (fp32), two (bf16) or four (int8). A Product says how a line
// meets an activation and how many bytes of the activation row belong to a line.
#pragma once
#include "packing.h"
#include "simd.h"

namespace remora::REMORA_LEVEL {

constexpr int BLOCK_VECTORS = BLOCK_COLUMNS / LANES;
constexpr int64_t LINE_BYTES = 64;

// Weights to fetch while a tile is computed: `bytes_per_line` from `next` on for every line.
struct Prefetch {
  const uint8_t* next;
  int64_t bytes_per_line;
};

#define REMORA_UNROLL _Pragma("GCC unroll 16")

// Rows of a tile are addressed in threes from a few pointers, which leaves registers for the loop.
template <int MR>
struct RowPointers {
  static constexpr int GROUPS = (MR + 2) / 3;
  const uint8_t* group[GROUPS];
  int64_t stride;

  REMORA_INLINE_MEMBER RowPointers(const uint8_t* first, int64_t row_stride) : stride(row_stride) {
    for (int i = 0; i < GROUPS; ++i) group[i] = first + 3 * i * stride;
  }
  REMORA_INLINE_MEMBER const uint8_t* row(int r) const { return group[r / 3] + r % 3 * stride; }
  REMORA_INLINE_MEMBER void advance(int64_t bytes) {
    for (int i = 0; i < GROUPS; ++i) group[i] += bytes;
  }
};

REMORA_INLINE float float_at(const uint8_t* p) {
  float x;
  __builtin_memcpy(&x, p, 4);
  return x;
}
REMORA_INLINE int32_t int_at(const uint8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

struct ProductFp32 {
  using Accumulator = vfloat;
  static constexpr int LINE_ACTIVATION_BYTES = 4;

  template <int MR, int NV>
  REMORA_INLINE void step(vfloat (&acc)[MR][NV], const uint8_t* const (&lines)[NV], const RowPointers<MR>& rows) {
    vfloat b[NV];
    REMORA_UNROLL for (int v = 0; v < NV; ++v) b[v] = load_as<vfloat>(lines[v]);
    REMORA_UNROLL for (int r = 0; r < MR; ++r) {
      const vfloat a = splat(float_at(rows.row(r)));
      REMORA_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
    }
  }
};

// bf16 weights, activations as fp32 that were rounded to bf16.
struct ProductBf16Wide {
  using Accumulator = vfloat;
  static constexpr int LINE_ACTIVATION_BYTES = 8;

  template <int MR, int NV>
  REMORA_INLINE void step(vfloat (&acc)[MR][NV], const uint8_t* const (&lines)[NV], const RowPointers<MR>& rows) {
    REMORA_UNROLL for (int half = 0; half < 2; ++half) {
      vfloat b[NV];
      REMORA_UNROLL for (int v = 0; v < NV; ++v) {
        const vuint raw = load_as<vuint>(lines[v]);
        b[v] = (vfloat)(half == 0 ? raw << 16 : raw & 0xffff0000u);
      }
      REMORA_UNROLL for (int r = 0; r < MR; ++r) {
        const vfloat a = splat(float_at(rows.row(r) + 4 * half));
        REMORA_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
      }
    }
  }
};

#if REMORA_DPBF16
REMORA_INLINE vfloat dot_pairs_bf16(vfloat acc, vint a, vint b) {
#if REMORA_EMULATE
  acc = fma((vfloat)((vuint)a << 16), (vfloat)((vuint)b << 16), acc);
  return fma((vfloat)((vuint)a & 0xffff0000u), (vfloat)((vuint)b & 0xffff0000u), acc);
#else
  return (vfloat)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#endif
}

struct ProductBf16Pairs {
  using Accumulator = vfloat;
  static constexpr int LINE_ACTIVATION_BYTES = 4;

  template <int MR, int NV>
  REMORA_INLINE void step(vfloat (&acc)[MR][NV], const uint8_t* const (&lines)[NV], const RowPointers<MR>& rows) {
    vint b[NV];
    REMORA_UNROLL for (int v = 0; v < NV; ++v) b[v] = load_as<vint>(lines[v]);
    REMORA_UNROLL for (int r = 0; r < MR; ++r) {
      const vint a = splat_int(int_at(rows.row(r)));
      REMORA_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] = dot_pairs_bf16(acc[r][v], a, b[v]);
    }
  }
};
#endif

#if REMORA_VNNI
// Unsigned activations (value + 128) against signed weights; the surplus 128 * column_sum is taken off afterwards.
REMORA_INLINE vint dot_fours(vint acc, vint a, vint b) {
#if REMORA_EMULATE
  REMORA_UNROLL for (int i = 0; i < 4; ++i) acc += ((a >> (8 * i)) & 255) * ((b << (24 - 8 * i)) >> 24);
  return acc;
#else
  return (vint)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#endif
}

struct ProductInt8 {
  using Accumulator = vint;
  static constexpr int LINE_ACTIVATION_BYTES = 4;

  template <int MR, int NV>
  REMORA_INLINE void step(vint (&acc)[MR][NV], const uint8_t* const (&lines)[NV], const RowPointers<MR>& rows) {
    vint b[NV];
    REMORA_UNROLL for (int v = 0; v < NV; ++v) b[v] = load_as<vint>(lines[v]);
    REMORA_UNROLL for (int r = 0; r < MR; ++r) {
      const vint a = splat_int(int_at(rows.row(r)));
      REMORA_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] = dot_fours(acc[r][v], a, b[v]);
    }
  }
};
#else
// Sums of products of neighbouring 16-bit values.
REMORA_INLINE vint multiply_add_pairs(vshort a, vshort b) {
#if REMORA_VECTOR_BYTES == 32 && defined(__AVX2__)
  return (vint)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif REMORA_VECTOR_BYTES == 16 && defined(__SSE2__)
  return (vint)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const vint low = (((vint)a << 16) >> 16) * (((vint)b << 16) >> 16);
  return low + ((vint)a >> 16) * ((vint)b >> 16);
#endif
}

// Activations as int16 in the order k0 k2 k1 k3, so that shifts suffice to widen the weights.
struct ProductInt8 {
  using Accumulator = vint;
  static constexpr int LINE_ACTIVATION_BYTES = 8;

  template <int MR, int NV>
  REMORA_INLINE void step(vint (&acc)[MR][NV], const uint8_t* const (&lines)[NV], const RowPointers<MR>& rows) {
    REMORA_UNROLL for (int half = 0; half < 2; ++half) {
      vshort b[NV];
      REMORA_UNROLL for (int v = 0; v < NV; ++v) {
        const vshort raw = load_as<vshort>(lines[v]);
        b[v] = half == 0 ? (raw << 8) >> 8 : raw >> 8;
      }
      REMORA_UNROLL for (int r = 0; r < MR; ++r) {
        const vshort a = (vshort)splat_int(int_at(rows.row(r) + 4 * half));
        REMORA_UNROLL for (int v = 0; v < NV; ++v) acc[r][v] += multiply_add_pairs(a, b[v]);
      }
    }
  }
};
#endif

// tile[r][column] for r < MR and 16 * NB columns, in rows of PANEL_COLUMNS; int32 for integer products.
template <class Product, int MR, int NB>
void micro_kernel(const uint8_t* activations, int64_t stride, const uint8_t* block, int64_t block_bytes, int64_t lines,
                  float* tile, Prefetch prefetch) {
  constexpr int NV = NB * BLOCK_VECTORS;
  typename Product::Accumulator acc[MR][NV] = {};
  RowPointers<MR> rows(activations, stride);
  for (int64_t line = 0; line < lines; ++line) {
    const uint8_t* vectors[NV];
    REMORA_UNROLL for (int v = 0; v < NV; ++v)
      vectors[v] = block + v / BLOCK_VECTORS * block_bytes + v % BLOCK_VECTORS * REMORA_VECTOR_BYTES;
    __builtin_prefetch(prefetch.next);
    prefetch.next += prefetch.bytes_per_line;
    Product::template step<MR, NV>(acc, vectors, rows);
    rows.advance(Product::LINE_ACTIVATION_BYTES);
    block += LINE_BYTES;
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) store_as(tile + r * PANEL_COLUMNS + v * LANES, acc[r][v]);
}

}  // namespace remora::REMORA_LEVEL
