// The inner loop of linear_grouped.cpp: activations of int8 or int16 against weights of 8 or 4 bits, in groups of
// INPUT_GROUP inputs. The sums of a group are exact integers, which then meet the scales of both sides as floats.
//
// One line of a block is 64 bytes: 4 bytes for each of 16 columns, with four (int8) or eight (int4) inputs. Each part of
// a line gives as many inputs of every column as 32 bits of activations hold.
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

#if REMORA_VNNI
// Bytes of weights, unsigned, with int8 activations: four inputs of each column at once.
struct ByteProduct {
  using Accumulator = vint;
  using Operand = vint;
  REMORA_INLINE vint activation(const uint8_t* x) { return splat_int(int_at(x)); }
  REMORA_INLINE vint multiply_add(vint a, vint b, vint acc) {
#if REMORA_EMULATE
    for (int bit = 0; bit < 32; bit += 8) acc += ((a << (24 - bit)) >> 24) * ((b >> bit) & 255);
    return acc;
#else
    return (vint)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)b, (__m512i)a);
#endif
  }
};

struct ProductGroupedInt8 : ByteProduct {
  static constexpr int PARTS = 1, LINE_INPUTS = 4;
  static constexpr bool SHIFTED = true;  // read as code + 128
  REMORA_INLINE vint weights(const uint8_t* line, int) {
    return (vint)(load_as<vuint>(line) ^ 0x80808080u);
  }
};

struct ProductGroupedInt4 : ByteProduct {
  static constexpr int PARTS = 2, LINE_INPUTS = 8;
  static constexpr bool SHIFTED = false;
  REMORA_INLINE vint weights(const uint8_t* line, int part) {
    const vuint raw = load_as<vuint>(line);
    return (vint)((part == 0 ? raw : raw >> 4) & 0x0f0f0f0fu);
  }
};
#else
// Pairs of 16-bit values: inputs 0 and 2, then 1 and 3 of every four, as encode_groups orders the activations.
struct PairProduct {
  using Accumulator = vint;
  using Operand = vshort;
  static constexpr bool SHIFTED = false;
  REMORA_INLINE vshort activation(const uint8_t* x) { return (vshort)splat_int(int_at(x)); }
  REMORA_INLINE vint multiply_add(vshort a, vshort b, vint acc) {
#if REMORA_VECTOR_BYTES == 32 && defined(__AVX2__)
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
  static constexpr int PARTS = 2, LINE_INPUTS = 4;
  REMORA_INLINE vshort weights(const uint8_t* line, int part) {
    const vshort raw = load_as<vshort>(line);
    return part == 0 ? (raw << 8) >> 8 : raw >> 8;
  }
};

struct ProductGroupedInt4 : PairProduct {
  static constexpr int PARTS = 4, LINE_INPUTS = 8;
  REMORA_INLINE vshort weights(const uint8_t* line, int part) {
    typedef uint16_t vunsigned __attribute__((vector_size(REMORA_VECTOR_BYTES), may_alias));
    const vunsigned raw = load_as<vunsigned>(line);
    switch (part) {
      case 0: return (vshort)(raw & 15);
      case 1: return (vshort)((raw >> 8) & 15);
      case 2: return (vshort)((raw >> 4) & 15);
      default: return (vshort)(raw >> 12);
    }
  }
};
#endif

// One call: all groups of a row tile and a block.
struct GroupedTile {
  const uint8_t* activations;
  int64_t stride;
  const float* row_scales;  // [row][scale_stride]
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
  constexpr int64_t LINES = INPUT_GROUP / Product::LINE_INPUTS;
  // Few sums stay in registers from group to group; many stand in the tile, which is in the level-1 cache.
  constexpr bool IN_REGISTERS = MR * NV <= 8;
  RowPointers<MR> rows(call.activations, call.stride);
  Prefetch prefetch = call.prefetch;
  const uint8_t* block = call.block;
  const uint16_t *scale = call.scale, *minimum = call.minimum;
  const int64_t next_panel = call.num_groups * PANEL_COLUMNS;
  const auto* scales = reinterpret_cast<const uint8_t*>(call.row_scales);
  const auto of_row = [&](auto r) REMORA_LAMBDA {
    return reinterpret_cast<const GroupScale*>(scales + r * call.scale_stride * 4);
  };
  float* const tile = call.tile;
  const auto place = [&](auto r, auto v) REMORA_LAMBDA { return tile + r * PANEL_COLUMNS + v * LANES; };
  vfloat sums[IN_REGISTERS ? MR : 1][NV];
  if constexpr (IN_REGISTERS) repeat<MR * NV>([&](auto i) REMORA_LAMBDA { sums[i / NV][i % NV] = vfloat{}; });
  for (int64_t group = 0; group < call.num_groups; ++group) {
    vint acc[MR][NV];
    repeat<MR * NV>([&](auto i) REMORA_LAMBDA {
      acc[i / NV][i % NV] = Product::SHIFTED ? splat_int(of_row(i / NV)->offset) : vint{};
    });
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
        total = fma(product, splat(of_row(r)->scale), total);
        if constexpr (MINIMUM) total = fma(column_minimum, splat(of_row(r)->scaled_sum), total);
        if constexpr (IN_REGISTERS) sums[r][v] = total;
        else store(place(r, v), total);
      });
    });
    if constexpr (MINIMUM) minimum += PANEL_COLUMNS;
    scale += PANEL_COLUMNS;
    scales += sizeof(GroupScale);
  }
  if constexpr (IN_REGISTERS) {
    repeat<NV>([&](auto v) REMORA_LAMBDA {
      repeat<MR>([&](auto r) REMORA_LAMBDA { store(place(r, v), sums[r][v]); });
    });
  }
}

#if REMORA_VNNI
// Adds the remainders of one row to its sums over the two blocks of a panel.
template <class Product>
void add_remainders(const Remainder* remainders, int32_t count, const uint8_t* panel, int64_t block_bytes,
                    const uint16_t* scale, float* sums) {
  constexpr int64_t GROUP_BYTES = INPUT_GROUP / Product::LINE_INPUTS * LINE_BYTES;
  vfloat total[2] = {load(sums), load(sums + LANES)};
  for (const Remainder* term = remainders; term < remainders + count; ++term) {
    const uint8_t* block = panel + term->group * GROUP_BYTES;
    RowPointers<1> row(reinterpret_cast<const uint8_t*>(term->codes), 0);
    Prefetch none{block, 0, 0};
    vint acc[1][2];
    repeat<2>([&](auto v) REMORA_LAMBDA { acc[0][v] = Product::SHIFTED ? splat_int(term->offset) : vint{}; });
    add_lines<Product, 1, 2>(acc, row, block, block_bytes, INPUT_GROUP / Product::LINE_INPUTS, none);
    repeat<2>([&](auto v) REMORA_LAMBDA {
      const vfloat column_scale = load_fp16(scale + term->group * PANEL_COLUMNS + v * LANES);
      total[v] = fma(__builtin_convertvector(acc[0][v], vfloat) * column_scale, splat(term->scale), total[v]);
    });
  }
  repeat<2>([&](auto v) REMORA_LAMBDA { store(sums + v * LANES, total[v]); });
}
#endif

}  // namespace remora::REMORA_LEVEL
