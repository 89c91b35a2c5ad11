// What linear.cpp and linear_grouped.cpp share: how rows are cut into tiles, which kernel sums a tile, and what becomes
// of the sums of a row. Level file header.
#pragma once
#include "encodings.h"
#include "linear.h"
#include "simd.h"

namespace remora::REMORA_LEVEL {

// Bytes of activations that may stay in the level-2 cache while panels of weights pass by.
#if REMORA_TILES
constexpr int64_t RESIDENT_BYTES = 1 << 20;
#elif REMORA_VECTOR_BYTES == 64
constexpr int64_t RESIDENT_BYTES = 512 << 10;
#else
constexpr int64_t RESIDENT_BYTES = 256 << 10;
#endif
constexpr int64_t STREAM_AHEAD_BYTES = 4096;

// Where a tile that has its panel to itself fetches ahead: the same place of the next panel, or, where a panel would
// fill the cache, a little ahead in the same one.
REMORA_INLINE int64_t stream_ahead(int64_t panel_bytes) {
  return panel_bytes <= RESIDENT_BYTES / 4 ? panel_bytes : 2 * STREAM_AHEAD_BYTES;
}

// Rows of a tile at most, as many as leave the accumulators in registers.
constexpr int MOST_TILE_ROWS = REMORA_VECTOR_BYTES == 64 ? 12 : REMORA_VECTOR_BYTES == 32 ? 6 : 2;

// Rows whose activations stay in the level-2 cache together: whole tiles, at least one.
REMORA_INLINE int64_t resident_rows(int64_t row_bytes, int64_t tile_rows) {
  const int64_t rows = RESIDENT_BYTES / row_bytes / tile_rows * tile_rows;
  return rows < tile_rows ? tile_rows : rows;
}

// First row of a tile when `count` rows are cut evenly. 512-bit levels have kernels for heights of 4, 8 and 12 (and 1 and
// 2), so that only the last tile computes spare rows; the others have one for every height.
constexpr int64_t TILE_UNIT = REMORA_VECTOR_BYTES == 64 ? 4 : 1;
REMORA_INLINE int64_t tile_begin(int64_t count, int64_t num_tiles, int64_t tile) {
  const int64_t row = (count + TILE_UNIT - 1) / TILE_UNIT * tile / num_tiles * TILE_UNIT;
  return row < count ? row : count;
}

template <class Function>
struct TileKernel {
  Function run;
  int num_blocks;  // 2: the whole panel in one call
};

// A kernel for this many rows, or for the next larger number that has one: it computes spare rows. A family has its
// Function, MAX_ROWS and run<ROWS, BLOCKS>.
template <class Family>
REMORA_INLINE TileKernel<typename Family::Function> tile_kernel(int64_t num_rows) {
#if REMORA_VECTOR_BYTES == 64
  if (num_rows == 1) return {Family::template run<1, 2>, 2};
  if (num_rows == 2) return {Family::template run<2, 2>, 2};
  if (num_rows <= 4) return {Family::template run<4, 2>, 2};
  if (num_rows <= 8) return {Family::template run<8, 2>, 2};
  return {Family::template run<Family::MAX_ROWS, 2>, 2};
#elif REMORA_VECTOR_BYTES == 32
  switch (num_rows) {
    case 1: return {Family::template run<1, 2>, 2};
    case 2: return {Family::template run<2, 2>, 2};
    case 3: return {Family::template run<3, 1>, 1};
    case 4: return {Family::template run<4, 1>, 1};
    case 5: return {Family::template run<Family::MAX_ROWS == 6 ? 5 : 4, 1>, 1};
    default: return {Family::template run<Family::MAX_ROWS, 1>, 1};
  }
#else
  if (num_rows == 1) return {Family::template run<1, 1>, 1};
  return {Family::template run<2, 1>, 1};
#endif
}

REMORA_INLINE vfloat silu_product(vfloat gate, vfloat up) { return gate / (splat(1.0f) + exp(-gate)) * up; }

// The units of one row of a panel, encoded for the layer that reads them; zeros behind the last one.
REMORA_INLINE void encode_units(const PackedLinear& weights, const LinearOutput& output, int64_t row, int64_t first,
                                const float* units) {
  const Encoding encoding = encoding_of(weights.dtype);
  uint8_t* target = output.encoded.data + row * output.encoded.stride;
  for (int i = 0; i < BLOCK_COLUMNS; i += LANES) store_encoded(encoding, target, first + i, load(units + i));
  const int64_t bytes = encoded_bytes(encoding), end = first + BLOCK_COLUMNS;
  if (end >= weights.num_out / 2 && end < output.encoded_columns)
    __builtin_memset(target + end * bytes, 0, static_cast<size_t>((output.encoded_columns - end) * bytes));
}

// Bias, and what the call fuses, on the sums of one row of a panel, which are used up.
static void finish_row(const PackedLinear& weights, const LinearOutput& output, int64_t row, int64_t panel,
                       float* values) {
  int64_t first = panel * PANEL_COLUMNS, end = weights.num_out, width = PANEL_COLUMNS;
  if (weights.bias != nullptr)
    for (int i = 0; i < PANEL_COLUMNS; i += LANES) store(values + i, load(values + i) + load(weights.bias + first + i));
  if (output.kind == LinearOutput::Kind::silu_store || output.kind == LinearOutput::Kind::silu_encoded) {
    first = panel * BLOCK_COLUMNS, end = weights.num_out / 2, width = BLOCK_COLUMNS;
    for (int i = 0; i < BLOCK_COLUMNS; i += LANES)
      store(values + i, silu_product(load(values + i), load(values + BLOCK_COLUMNS + i)));
    if (output.kind == LinearOutput::Kind::silu_encoded) return encode_units(weights, output, row, first, values);
  }
  float* out = output.out + row * output.stride + first;
  const int64_t count = end - first < width ? end - first : width;
  const bool adds = output.kind == LinearOutput::Kind::add;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, adds ? load(out + i) + load(values + i) : load(values + i));
  for (; i < count; ++i) out[i] = adds ? out[i] + values[i] : values[i];
}

}  // namespace remora::REMORA_LEVEL
