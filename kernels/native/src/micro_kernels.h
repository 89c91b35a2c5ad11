// The inner loops of linear.cpp on vectors: MR rows against NB blocks of 16 columns, all of k, accumulators in
// registers.
//
// One line of a block is 64 bytes: its 16 columns at one k (fp32), or two (bf16). A Product says how a line
// meets an activation row, in one part or, where the weights must be widened first, in two.
#pragma once
#include "packing.h"
#include "simd.h"

namespace remora::REMORA_LEVEL {

constexpr int BLOCK_VECTORS = BLOCK_COLUMNS / LANES;
constexpr int64_t LINE_BYTES = 64;

// Weights to fetch into the level-2 cache while a tile is computed: for every line a line at `next`, which moves on by
// `bytes_per_line`, and, of a kernel of two blocks, one `second` bytes behind it.
struct Prefetch {
  const uint8_t* next;
  int64_t bytes_per_line, second;
};

// One call: `lines` lines of a row tile and a block. `resume` goes on from the sums that stand in `tile`.
struct MicroTile {
  const uint8_t* activations;
  int64_t stride;
  const uint8_t* block;
  int64_t block_bytes, lines;
  float* tile;
  bool resume;
  Prefetch prefetch;
};

#define REMORA_LAMBDA __attribute__((always_inline))

// Calls body(0) .. body(COUNT - 1) with the index as a constant. Loops that the compiler unrolls itself come too late
// for gcc to keep arrays of accumulators in registers.
template <int I>
struct Index {
  constexpr operator int() const { return I; }
};
template <int COUNT, int I = 0, class Body>
REMORA_INLINE void repeat(const Body& body) {
  if constexpr (I < COUNT) {
    body(Index<I>{});
    repeat<COUNT, I + 1>(body);
  }
}

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
  using Operand = vfloat;
  static constexpr int PARTS = 1;
  REMORA_INLINE vfloat weights(const uint8_t* line, int) { return load_as<vfloat>(line); }
  REMORA_INLINE vfloat activation(const uint8_t* x) { return splat(float_at(x)); }
  REMORA_INLINE vfloat multiply_add(vfloat a, vfloat b, vfloat acc) { return fma(a, b, acc); }
};

// bf16 weights, activations as fp32 that were rounded to bf16.
struct ProductBf16Wide : ProductFp32 {
  static constexpr int PARTS = 2;
  REMORA_INLINE vfloat weights(const uint8_t* line, int part) {
    const vuint raw = load_as<vuint>(line);
    return (vfloat)(part == 0 ? raw << 16 : raw & 0xffff0000u);
  }
};

#if REMORA_VECTOR_BYTES == 32
// The same for many rows: a slice of the panel is widened once, and all row tiles read it as fp32.
struct ProductBf16Widened : ProductFp32 {};

// Lines of bf16 weights as twice as many lines of fp32, in the order of k.
REMORA_INLINE void widen_lines(const uint8_t* lines, int64_t num_lines, float* out) {
  for (; num_lines > 0; --num_lines, lines += LINE_BYTES, out += 2 * BLOCK_COLUMNS) {
    repeat<BLOCK_VECTORS>([&](auto v) REMORA_LAMBDA {
      const uint8_t* line = lines + v * REMORA_VECTOR_BYTES;
      store(out + v * LANES, ProductBf16Wide::weights(line, 0));
      store(out + BLOCK_COLUMNS + v * LANES, ProductBf16Wide::weights(line, 1));
    });
  }
}
#endif

#if REMORA_DPBF16
struct ProductBf16Pairs {
  using Accumulator = vfloat;
  using Operand = vint;
  static constexpr int PARTS = 1;
  REMORA_INLINE vint weights(const uint8_t* line, int) { return load_as<vint>(line); }
  REMORA_INLINE vint activation(const uint8_t* x) { return splat_int(int_at(x)); }
  REMORA_INLINE vfloat multiply_add(vint a, vint b, vfloat acc) {
#if REMORA_EMULATE
    acc = fma((vfloat)((vuint)a << 16), (vfloat)((vuint)b << 16), acc);
    return fma((vfloat)((vuint)a & 0xffff0000u), (vfloat)((vuint)b & 0xffff0000u), acc);
#else
    return (vfloat)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#endif
  }
};
#endif

// A point that no operation on an accumulator moves across: gcc would start the second part of a line before the first
// is done, and spill.
template <class V>
REMORA_INLINE void pin(V& acc) {
#if REMORA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  asm("" : "+v"(acc));
#elif REMORA_VECTOR_BYTES == 32 && defined(__AVX2__)
  asm("" : "+x"(acc));
#else
  (void)acc;
#endif
}

// Adds one line to the accumulators of MR rows from `FIRST` on. `offset`: bytes behind where the rows' pointers stand.
template <class Product, int MR, int NB, int FIRST = 0, class Accumulators, class Rows>
REMORA_INLINE void add_line(Accumulators& acc, const Rows& rows, int64_t offset, const uint8_t* block,
                            int64_t block_bytes) {
  constexpr int NV = NB * BLOCK_VECTORS;
  repeat<Product::PARTS>([&](auto part) REMORA_LAMBDA {
    typename Product::Operand b[NV];
    repeat<NV>([&](auto v) REMORA_LAMBDA {
      const uint8_t* column = block + v / BLOCK_VECTORS * block_bytes;
      b[v] = Product::weights(column + v % BLOCK_VECTORS * REMORA_VECTOR_BYTES, part);
    });
    repeat<MR>([&](auto r) REMORA_LAMBDA {
      const typename Product::Operand a = Product::activation(rows.row(FIRST + r) + offset + 4 * part);
      repeat<NV>([&](auto v) REMORA_LAMBDA { acc[r][v] = Product::multiply_add(a, b[v], acc[r][v]); });
    });
    if constexpr (Product::PARTS > 1) repeat<MR * NV>([&](auto i) REMORA_LAMBDA { pin(acc[i / NV][i % NV]); });
  });
}

template <int NB>
REMORA_INLINE void fetch_line(Prefetch& prefetch) {
  __builtin_prefetch(prefetch.next, 0, 2);
  if (NB == 2) __builtin_prefetch(prefetch.next + prefetch.second, 0, 2);
  prefetch.next += prefetch.bytes_per_line;
}

// Adds `lines` lines to the accumulators.
template <class Product, int MR, int NB, class Accumulators>
REMORA_INLINE void add_lines(Accumulators& acc, RowPointers<MR>& rows, const uint8_t*& block, int64_t block_bytes,
                             int64_t lines, Prefetch& prefetch) {
  for (int64_t line = lines; line > 0; --line) {
    fetch_line<NB>(prefetch);
    add_line<Product, MR, NB>(acc, rows, 0, block, block_bytes);
    rows.advance(4 * Product::PARTS);
    block += LINE_BYTES;
  }
}

// tile[r][column] for r < MR and 16 * NB columns, in rows of PANEL_COLUMNS.
template <class Product, int MR, int NB>
void sum_products(const MicroTile& call) {
  constexpr int NV = NB * BLOCK_VECTORS;
  vfloat acc[MR][NV];
  float* const tile = call.tile;
  repeat<MR * NV>([&](auto i) REMORA_LAMBDA {
    acc[i / NV][i % NV] = call.resume ? load(tile + i / NV * PANEL_COLUMNS + i % NV * LANES) : vfloat{};
  });
  RowPointers<MR> rows(call.activations, call.stride);
  Prefetch prefetch = call.prefetch;
  const uint8_t* block = call.block;
  add_lines<Product, MR, NB>(acc, rows, block, call.block_bytes, call.lines, prefetch);
  repeat<MR * NV>([&](auto i) REMORA_LAMBDA {
    store(tile + i / NV * PANEL_COLUMNS + i % NV * LANES, acc[i / NV][i % NV]);
  });
}

}  // namespace remora::REMORA_LEVEL
