// The inner loop of linear_grouped.cpp: int16 activations against weights of 8 or 4 bits, in groups of INPUT_GROUP
// inputs. The sums of a group are exact integers, which then meet the scales of both sides as floats.
//
// One line of a block is 64 bytes: 4 bytes for each of 16 columns, with four (int8) or eight (int4) inputs. Part p of a
// line gives the inputs 2p and 2p + 1 of every column as a pair of 16-bit values, as packing.h lays them out.
#pragma once
#include "micro_kernels.h"

namespace remora::REMORA_LEVEL {

// LANES halves (IEEE fp16, finite) as floats, exactly.
REMORA_INLINE vfloat load_fp16(const uint16_t* p) {
#if REMORA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  return (vfloat)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif REMORA_VECTOR_BYTES == 32 && defined(__F16C__)
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const vuint bits = __builtin_convertvector(load_as<vhalf_bits>(p), vuint);
  const vfloat magnitude = (vfloat)((bits & 0x7fffu) << 13) * splat(0x1p112f);
  return (vfloat)((vuint)magnitude | (bits & 0x8000u) << 16);
#endif
}

struct PairProduct {
  using Accumulator = vint;
  using Operand = vshort;
  REMORA_INLINE vshort activation(const uint8_t* x) { return (vshort)splat_int(int_at(x)); }
  REMORA_INLINE vint multiply_add(vshort a, vshort b, vint acc) {
#if REMORA_VNNI && !REMORA_EMULATE
    return (vint)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif REMORA_VECTOR_BYTES == 32 && defined(__AVX2__)
    return acc + (vint)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif REMORA_VECTOR_BYTES == 16 && defined(__SSE2__)
    return acc + (vint)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const vint low = (((vint)a << 16) >> 16) * (((vint)b << 16) >> 16);
    return acc + low + ((vint)a >> 16) * ((vint)b >> 16);
#endif
  }
};

struct ProductGroupedInt8 : PairProduct {
  static constexpr int PARTS = 2;
  REMORA_INLINE vshort weights(const uint8_t* line, int part) {
    const vshort raw = load_as<vshort>(line);
    return part == 0 ? (raw << 8) >> 8 : raw >> 8;
  }
};

struct ProductGroupedInt4 : PairProduct {
  static constexpr int PARTS = 4;
  REMORA_INLINE vshort weights(const uint8_t* line, int part) {
    typedef uint16_t vunsigned __attribute__((vector_size(REMORA_VECTOR_BYTES), may_alias));
    const vunsigned raw = load_as<vunsigned>(line);
    return part == 3 ? (vshort)(raw >> 12) : (vshort)((raw >> (4 * part)) & 15);
  }
};

// One call: all groups of a row tile and a block.
struct GroupedTile {
  const uint8_t* activations;  // int16
  int64_t stride;
  const float* row_scales;  // [row][scale_stride]: scale and scaled sum of each group
  int64_t scale_stride;
  const uint8_t* block;
  int64_t block_bytes;
  const uint16_t *scale, *minimum;  // [group][PANEL_COLUMNS]; minimum may be null
  int64_t num_groups;
  float* tile;
  Prefetch prefetch;
};

// MINIMUM: the weights have one.
template <class Product, bool MINIMUM, int MR, int NB>
void sum_grouped(const GroupedTile& call) {
  constexpr int NV = NB * BLOCK_VECTORS;
  constexpr int64_t LINES = INPUT_GROUP / (2 * Product::PARTS);
  // Few sums stay in registers from group to group; many stand in the tile, which is in the level-1 cache.
  constexpr bool IN_REGISTERS = MR * NV <= 8;
  RowPointers<MR> rows(call.activations, call.stride);
  Prefetch prefetch = call.prefetch;
  const uint8_t* block = call.block;
  const uint16_t *scale = call.scale, *minimum = call.minimum;
  const int64_t next_panel = call.num_groups * PANEL_COLUMNS;
  const float* row_scales = call.row_scales;
  float* const tile = call.tile;
  const auto place = [&](auto r, auto v) REMORA_LAMBDA { return tile + r * PANEL_COLUMNS + v * LANES; };
  vfloat sums[IN_REGISTERS ? MR : 1][NV];
  if constexpr (IN_REGISTERS) repeat<MR * NV>([&](auto i) REMORA_LAMBDA { sums[i / NV][i % NV] = vfloat{}; });
  for (int64_t group = 0; group < call.num_groups; ++group) {
    vint acc[MR][NV];
    repeat<MR * NV>([&](auto i) REMORA_LAMBDA { acc[i / NV][i % NV] = vint{}; });
    add_lines<Product, MR, NB>(acc, rows, block, call.block_bytes, LINES, prefetch);
    __builtin_prefetch(scale + next_panel, 0, 2);
    if constexpr (MINIMUM) __builtin_prefetch(minimum + next_panel, 0, 2);
    repeat<NV>([&](auto v) REMORA_LAMBDA {
      const vfloat column_scale = load_fp16(scale + v * LANES);
      vfloat column_minimum = {};
      if constexpr (MINIMUM) column_minimum = load_fp16(minimum + v * LANES);
      repeat<MR>([&](auto r) REMORA_LAMBDA {
        vfloat total = {};
        if constexpr (IN_REGISTERS) total = sums[r][v];
        else if (group > 0) total = load(place(r, v));
        const vfloat product = __builtin_convertvector(acc[r][v], vfloat) * column_scale;
        total = fma(product, splat(row_scales[r * call.scale_stride]), total);
        if constexpr (MINIMUM) total = fma(column_minimum, splat(row_scales[r * call.scale_stride + 1]), total);
        if constexpr (IN_REGISTERS) sums[r][v] = total;
        else store(place(r, v), total);
      });
    });
    if constexpr (MINIMUM) minimum += PANEL_COLUMNS;
    scale += PANEL_COLUMNS;
    row_scales += 2;
  }
  if constexpr (IN_REGISTERS) {
    repeat<NV>([&](auto v) REMORA_LAMBDA {
      repeat<MR>([&](auto r) REMORA_LAMBDA { store(place(r, v), sums[r][v]); });
    });
  }
}

}  // namespace remora::REMORA_LEVEL
