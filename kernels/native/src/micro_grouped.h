// The inner loop of linear_grouped.cpp: activations of int8 or int16 against weights of 8 or 4 bits, in groups of
// INPUT_GROUP inputs. The sums of a group are exact integers, which then meet the scales of both sides as floats.
// linear_grouped.h says how the levels differ.
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

// x * 2^exponent; whole exponents.
REMORA_INLINE vfloat scale_by_power(vfloat x, vfloat exponent) {
#if REMORA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  return (vfloat)_mm512_maskz_scalef_ps(0xffff, (__m512)x, (__m512)exponent);
#else
  return x * (vfloat)((__builtin_convertvector(exponent, vint) + 127) << 23);
#endif
}

#if REMORA_VNNI
// Bytes of weights, unsigned, with int8 activations: four inputs of each column at once.
struct ByteProduct {
  using Accumulator = vint;
  using Operand = vint;
  static constexpr bool POWERS = true;  // GroupScale has powers of two
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
  static constexpr bool SHIFTED = true;  // code + 128, as packed
  REMORA_INLINE vint weights(const uint8_t* line, int) { return load_as<vint>(line); }
  // The codes of input `place` of a line.
  REMORA_INLINE vint codes(const uint8_t* line, int place) {
    return ((load_as<vint>(line) >> splat_int(8 * place)) & 255) - 128;
  }
};

struct ProductGroupedInt4 : ByteProduct {
  static constexpr int PARTS = 2, LINE_INPUTS = 8;
  static constexpr bool SHIFTED = false;
  REMORA_INLINE vint weights(const uint8_t* line, int part) {
    const vuint raw = load_as<vuint>(line);
    return (vint)((part == 0 ? raw : raw >> 4) & 0x0f0f0f0fu);
  }
  REMORA_INLINE vint codes(const uint8_t* line, int place) {
    return (load_as<vint>(line) >> splat_int(8 * (place % 4) + 4 * (place / 4))) & 15;
  }
};
#else
// Pairs of 16-bit values: inputs 0 and 2, then 1 and 3 of every four, as encode_groups orders the activations.
struct PairProduct {
  using Accumulator = vint;
  using Operand = vshort;
  static constexpr bool SHIFTED = false, POWERS = false;
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
    const vshort raw = (vshort)(load_as<vuint>(line) ^ 0x80808080u);
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
  const uint16_t* scale;      // [group][PANEL_COLUMNS]
  const int16_t* minimum;     // [pair of groups][PANEL_COLUMNS][2], or null
  const float* minimum_step;  // [PANEL_COLUMNS]
  int64_t num_groups;
  float* tile;
  Prefetch prefetch;
};

#if REMORA_VNNI
REMORA_INLINE vint add_pairs(vint a, vint b, vint acc) {
#if REMORA_EMULATE
  return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#else
  return (vint)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#endif
}

// Starts the sums of a tile with what the minimums of the weights make, in steps of the row. encode_groups keeps the
// codes of sums small enough for 32 bits.
template <int MR, int NB, class Sums>
REMORA_INLINE void sum_minimums(const GroupedTile& call, Sums& sums) {
  constexpr int NV = NB * BLOCK_VECTORS;
  const int64_t pairs = (call.num_groups + 1) / 2, next_panel = pairs * PANEL_COLUMNS * 2;
  const auto* behind = reinterpret_cast<const uint8_t*>(call.row_scales) +
                       call.num_groups * static_cast<int64_t>(sizeof(GroupScale));
  RowPointers<MR> rows(behind, call.scale_stride * 4);
  vint acc[MR][NV] = {};
  const int16_t* minimum = call.minimum;
  for (int64_t pair = 0; pair < pairs; ++pair, minimum += PANEL_COLUMNS * 2) {
    __builtin_prefetch(minimum + next_panel, 0, 2);
    if (NB == 2) __builtin_prefetch(minimum + next_panel + BLOCK_COLUMNS * 2, 0, 2);
    repeat<MR * NV>([&](auto i) REMORA_LAMBDA {
      const vint sum_codes = splat_int(int_at(rows.row(i / NV) + sizeof(RowScale) + 4 * pair));
      acc[i / NV][i % NV] = add_pairs(sum_codes, load_as<vint>(minimum + i % NV * LANES * 2), acc[i / NV][i % NV]);
    });
  }
  repeat<MR * NV>([&](auto i) REMORA_LAMBDA {
    const float step = reinterpret_cast<const RowScale*>(rows.row(i / NV))->sum_step;
    sums[i / NV][i % NV] = __builtin_convertvector(acc[i / NV][i % NV], vfloat) *
                           (load(call.minimum_step + i % NV * LANES) * splat(step));
  });
}
#endif

// The same pointer, of which the compiler does not know it: it would read the lines of a group once for all strips, and
// spill them.
REMORA_INLINE const uint8_t* hide(const uint8_t* p) {
  asm volatile("" : "+r"(p));
  return p;
}

// MINIMUM: the weights have one. Sums of rows stay in registers from group to group where there are enough of these;
// else they stand in the tile, which is in the level-1 cache. The products of a group are summed for a strip of rows at a
// time, which is as many as keep the multipliers busy.
template <class Product, bool MINIMUM, int MR, int NB>
void sum_grouped(const GroupedTile& call) {
  constexpr int NV = NB * BLOCK_VECTORS;
  constexpr int LINES = INPUT_GROUP / Product::LINE_INPUTS;
  constexpr bool IN_REGISTERS = MR * NV <= (REMORA_VECTOR_BYTES == 64 ? 16 : 8);
  constexpr int STRIP = REMORA_VECTOR_BYTES == 64 && MR > 4 ? 4 : MR;
  static_assert(MR % STRIP == 0, "whole strips");
  RowPointers<MR> rows(call.activations, call.stride);
  RowPointers<MR> scales(reinterpret_cast<const uint8_t*>(call.row_scales), call.scale_stride * 4);
  Prefetch prefetch = call.prefetch;
  const uint8_t* block = call.block;
  const uint16_t* scale = call.scale;
  const int16_t* minimum = call.minimum;
  const int64_t next_panel = call.num_groups * PANEL_COLUMNS;
  float* const tile = call.tile;
  const auto place = [&](auto r, auto v) REMORA_LAMBDA { return tile + r * PANEL_COLUMNS + v * LANES; };
  vfloat sums[IN_REGISTERS ? MR : 1][NV];
  if constexpr (IN_REGISTERS) repeat<MR * NV>([&](auto i) REMORA_LAMBDA { sums[i / NV][i % NV] = vfloat{}; });
#if REMORA_VNNI
  if constexpr (MINIMUM) sum_minimums<MR, NB>(call, sums);
#endif
  constexpr bool ADDS_MINIMUM = MINIMUM && !Product::POWERS;
  for (int64_t group = 0; group < call.num_groups; ++group) {
    const auto of_row = [&](int r) REMORA_LAMBDA { return reinterpret_cast<const GroupScale*>(scales.row(r)); };
    __builtin_prefetch(scale + next_panel, 0, 2);
    if constexpr (ADDS_MINIMUM) __builtin_prefetch(minimum + next_panel, 0, 2);
    repeat<MR / STRIP>([&](auto strip) REMORA_LAMBDA {
      constexpr int FIRST = strip * STRIP;
      // Halves of bytes are taken apart once; that is worth it.
      const uint8_t* const lines = Product::PARTS == 1 ? hide(block) : block;
      vint acc[STRIP][NV];
      repeat<STRIP * NV>([&](auto i) REMORA_LAMBDA {
        acc[i / NV][i % NV] = Product::SHIFTED ? splat_int(of_row(FIRST + i / NV)->offset) : vint{};
      });
      repeat<LINES>([&](auto line) REMORA_LAMBDA {
        if constexpr (FIRST == 0) fetch_line<NB>(prefetch);
        add_line<Product, STRIP, NB, FIRST>(acc, rows, line * 4 * Product::PARTS, lines + line * LINE_BYTES,
                                            call.block_bytes);
        repeat<STRIP * NV>([&](auto i) REMORA_LAMBDA { pin(acc[i / NV][i % NV]); });
      });
      repeat<NV>([&](auto v) REMORA_LAMBDA {
        const vfloat column_scale = load_fp16(scale + v * LANES);
        vfloat column_minimum = {};
        if constexpr (ADDS_MINIMUM) {
          const vint pair = load_as<vint>(minimum + v * LANES * 2);
          column_minimum = __builtin_convertvector(group % 2 == 0 ? (pair << 16) >> 16 : pair >> 16, vfloat) *
                           load(call.minimum_step + v * LANES);
        }
        repeat<STRIP>([&](auto r) REMORA_LAMBDA {
          const GroupScale* const of = of_row(FIRST + r);
          vfloat total = {};
          if constexpr (IN_REGISTERS) total = sums[FIRST + r][v];
          else if (group > 0) total = load(place(r, v));
          const vfloat product = __builtin_convertvector(acc[r][v], vfloat);
          if constexpr (Product::POWERS)
            total = fma(product,
                        scale_by_power(column_scale, splat(of->scale)) +
                            scale_by_power(column_scale, splat(of->scale_low)),
                        total);
          else total = fma(product * column_scale, splat(of->scale), total);
          if constexpr (ADDS_MINIMUM) total = fma(column_minimum, splat(of->scaled_sum), total);
          if constexpr (IN_REGISTERS) sums[FIRST + r][v] = total;
          else store(place(r, v), total);
        });
      });
    });
    block += LINES * LINE_BYTES;
    rows.advance(LINES * 4 * Product::PARTS);
    scales.advance(sizeof(GroupScale));
    if constexpr (ADDS_MINIMUM) minimum += group % 2 * PANEL_COLUMNS * 2;
    scale += PANEL_COLUMNS;
  }
  if constexpr (IN_REGISTERS)
    repeat<MR * NV>([&](auto i) REMORA_LAMBDA {
      store(tile + i / NV * PANEL_COLUMNS + i % NV * LANES, sums[i / NV][i % NV]);
    });
}

#if REMORA_VNNI
// Adds the outliers of one row to its sums over the two blocks of a panel, and gives them the step of the row.
template <class Product>
void finish_sums(const RowParts& row, const uint8_t* panel, int64_t block_bytes, const uint16_t* scale, float* sums) {
  vfloat total[2] = {load(sums), load(sums + LANES)};
  const Outlier* const end = row.outliers + row.row->num_outliers;
  for (const Outlier* outlier = row.outliers; outlier < end; ++outlier) {
    const auto input = static_cast<uint32_t>(outlier->input);
    const uint8_t* line = panel + input / Product::LINE_INPUTS * LINE_BYTES;
    const uint16_t* column_scale = scale + input / INPUT_GROUP * PANEL_COLUMNS;
    repeat<2>([&](auto v) REMORA_LAMBDA {
      const vint codes = Product::codes(line + v * block_bytes, static_cast<int>(input % Product::LINE_INPUTS));
      const vfloat weights = __builtin_convertvector(codes, vfloat) * load_fp16(column_scale + v * LANES);
      total[v] = fma(weights, splat(outlier->steps), total[v]);
    });
  }
  repeat<2>([&](auto v) REMORA_LAMBDA { store(sums + v * LANES, total[v] * splat(row.row->step)); });
}
#endif

}  // namespace remora::REMORA_LEVEL
