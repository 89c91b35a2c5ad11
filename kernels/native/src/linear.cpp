#include "linear.h"

#include <type_traits>

#include "encodings.h"
#include "linear_grouped.h"
#include "micro_kernels.h"
#include "simd.h"
#include "tiles.h"

namespace remora::REMORA_LEVEL {
namespace {

// Bytes of activations that may stay in the level-2 cache while panels of weights pass by.
#if REMORA_TILES
constexpr int64_t RESIDENT_BYTES = 1 << 20;
#elif REMORA_VECTOR_BYTES == 64
constexpr int64_t RESIDENT_BYTES = 512 << 10;
#else
constexpr int64_t RESIDENT_BYTES = 256 << 10;
#endif
constexpr int64_t STREAM_AHEAD_BYTES = 4096;
// Rows from which on it is worth widening a slice of bf16 weights once, for all row tiles.
constexpr int64_t WIDENED_ROWS = 5;
// Lines of a panel's two blocks that stay in the level-1 cache: 16 KiB.
constexpr int64_t SLICE_LINES = 128;

REMORA_INLINE vfloat silu_product(vfloat gate, vfloat up) { return gate / (splat(1.0f) + exp(-gate)) * up; }

// What is common to all tiles of one call.
struct Call {
  const PackedLinear& weights;
  const Activations& activations;
  const LinearOutput& output;
  int64_t num_rows;
  Encoding encoding;

  const uint8_t* row(int64_t index) const { return activations.data + index * activations.stride; }
};

void store_row(const LinearOutput& output, float* out, const float* values, int64_t count) {
  const bool add = output.kind == LinearOutput::Kind::add;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, add ? load(out + i) + load(values + i) : load(values + i));
  for (; i < count; ++i) out[i] = add ? out[i] + values[i] : values[i];
}

void silu_row(const Call& call, int64_t row, int64_t panel, const float* values) {
  const LinearOutput& output = call.output;
  const int64_t first = panel * BLOCK_COLUMNS, num_units = call.weights.num_out / 2;
  float units[BLOCK_COLUMNS];
  for (int i = 0; i < BLOCK_COLUMNS; i += LANES)
    store(units + i, silu_product(load(values + i), load(values + BLOCK_COLUMNS + i)));
  if (output.kind == LinearOutput::Kind::silu_store) {
    const int64_t count = num_units - first < BLOCK_COLUMNS ? num_units - first : BLOCK_COLUMNS;
    __builtin_memcpy(output.out + row * output.stride + first, units, static_cast<size_t>(count) * 4);
    return;
  }
  uint8_t* target = output.encoded.data + row * output.encoded.stride;
  for (int i = 0; i < BLOCK_COLUMNS; i += LANES) store_encoded(call.encoding, target, first + i, load(units + i));
  const int64_t bytes = encoded_bytes(call.encoding), end = first + BLOCK_COLUMNS;
  if (end >= num_units && end < output.encoded_columns) {
    __builtin_memset(target + end * bytes, 0, static_cast<size_t>((output.encoded_columns - end) * bytes));
  }
}

// Turns sums into outputs: bias, and what the call fuses. `tile` holds rows of PANEL_COLUMNS.
void finish_tile(const Call& call, int64_t first_row, int64_t num_rows, int64_t panel, float* tile) {
  const PackedLinear& weights = call.weights;
  const LinearOutput& output = call.output;
  const int64_t first = panel * PANEL_COLUMNS;
  const bool plain = output.kind == LinearOutput::Kind::store || output.kind == LinearOutput::Kind::add;
  for (int64_t r = 0; r < num_rows; ++r) {
    float* values = tile + r * PANEL_COLUMNS;
    const int64_t row = first_row + r;
    for (int i = 0; i < PANEL_COLUMNS; i += LANES) {
      vfloat v = load(values + i);
      if (weights.bias != nullptr) v += load(weights.bias + first + i);
      store(values + i, v);
    }
    if (plain) {
      const int64_t count = weights.num_out - first < PANEL_COLUMNS ? weights.num_out - first : PANEL_COLUMNS;
      store_row(output, output.out + row * output.stride + first, values, count);
    } else {
      silu_row(call, row, panel, values);
    }
  }
}

using MicroKernel = void (*)(const MicroTile&);

struct TileKernel {
  MicroKernel kernel;
  int num_blocks;  // 2: the whole panel in one call
};

// Whether the tiles read a widened copy of the panel; see ProductBf16Widened.
template <class Product>
constexpr bool is_widened() {
#if REMORA_VECTOR_BYTES == 32
  return std::is_same_v<Product, ProductBf16Widened>;
#else
  return false;
#endif
}

// Rows of a tile at most, as many as leave the accumulators in registers.
template <class Product>
constexpr int max_tile_rows() {
  if (REMORA_VECTOR_BYTES == 64) return 12;
  if (REMORA_VECTOR_BYTES == 16) return 2;
  // 6 would fit weights that are widened on the way too, but gcc then moves registers around: 20 % slower than 4.
  return Product::PARTS == 2 ? 4 : 6;
}

// A kernel for this many rows, or for the next larger number that has one: it computes spare rows.
template <class Product>
TileKernel tile_kernel(int64_t num_rows) {
#if REMORA_VECTOR_BYTES == 64
  if (num_rows == 1) return {sum_products<Product, 1, 2>, 2};
  if (num_rows == 2) return {sum_products<Product, 2, 2>, 2};
  if (num_rows <= 4) return {sum_products<Product, 4, 2>, 2};
  if (num_rows <= 8) return {sum_products<Product, 8, 2>, 2};
  return {sum_products<Product, 12, 2>, 2};
#elif REMORA_VECTOR_BYTES == 32
  switch (num_rows) {
    case 1: return {sum_products<Product, 1, 2>, 2};
    case 2: return {sum_products<Product, 2, 2>, 2};
    case 3: return {sum_products<Product, 3, 1>, 1};
    case 4: return {sum_products<Product, 4, 1>, 1};
    case 5: return {sum_products<Product, max_tile_rows<Product>() == 6 ? 5 : 4, 1>, 1};
    default: return {sum_products<Product, max_tile_rows<Product>(), 1>, 1};
  }
#else
  if (num_rows == 1) return {sum_products<Product, 1, 1>, 1};
  return {sum_products<Product, 2, 1>, 1};
#endif
}

// Rows [begin, end) against one panel. Several row tiles take the panel in slices that stay in the level-1 cache while
// the tiles pass by; their sums stand in `sums`, each tile at its own multiple of max_tile_rows(), since spare rows are
// summed too.
template <class Product>
void multiply_panel(const Call& call, int64_t begin, int64_t end, int64_t panel_index, float* sums) {
  constexpr int64_t MAX_ROWS = max_tile_rows<Product>();
  const int64_t count = end - begin, num_tiles = (count + MAX_ROWS - 1) / MAX_ROWS;
  const int64_t panel_bytes = call.weights.panel_bytes(), block_bytes = panel_bytes / 2;
  constexpr bool WIDENED = is_widened<Product>();
  // Lines that the kernel sees for each line of the panel.
  constexpr int64_t WIDTH = WIDENED ? 2 : 1;
  const int64_t lines = block_bytes / LINE_BYTES;
  const int64_t slice = WIDENED ? SLICE_LINES / WIDTH : num_tiles == 1 ? lines : SLICE_LINES;
  constexpr int64_t WIDE_BLOCK = SLICE_LINES * BLOCK_COLUMNS;
  alignas(64) float wide[WIDENED ? 2 * WIDE_BLOCK : 1];
  const uint8_t* panel = call.weights.data + panel_index * panel_bytes;
  // Each call fetches lines of the next panel in proportion to its own.
  const uint8_t* next = panel + panel_bytes;
  for (int64_t line = 0; line < lines; line += slice) {
    const int64_t slice_lines = lines - line < slice ? lines - line : slice;
#if REMORA_VECTOR_BYTES == 32
    if constexpr (WIDENED) {
      for (int b = 0; b < 2; ++b)
        widen_lines(panel + b * block_bytes + line * LINE_BYTES, slice_lines, wide + b * WIDE_BLOCK);
    }
#endif
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t first = count * t / num_tiles, last = count * (t + 1) / num_tiles;
      const TileKernel chosen = tile_kernel<Product>(last - first);
      for (int64_t b = 0; b < 2; b += chosen.num_blocks) {
        const uint8_t* block = panel + b * block_bytes + line * LINE_BYTES;
        if (WIDENED) block = reinterpret_cast<const uint8_t*>(wide + b * WIDE_BLOCK);
        MicroTile part{call.row(begin + first) + line * 4 * Product::PARTS * WIDTH,
                       call.activations.stride,
                       block,
                       WIDENED ? WIDE_BLOCK * 4 : block_bytes,
                       slice_lines * WIDTH,
                       sums + t * MAX_ROWS * PANEL_COLUMNS + b * BLOCK_COLUMNS,
                       line > 0,
                       {next, chosen.num_blocks * LINE_BYTES / (num_tiles * WIDTH)}};
        if (num_tiles == 1) part.prefetch.next = part.block + STREAM_AHEAD_BYTES;
        next += part.prefetch.bytes_per_line * part.lines;
        chosen.kernel(part);
      }
    }
  }
  for (int64_t t = 0; t < num_tiles; ++t) {
    const int64_t first = count * t / num_tiles, last = count * (t + 1) / num_tiles;
    finish_tile(call, begin + first, last - first, panel_index, sums + t * MAX_ROWS * PANEL_COLUMNS);
  }
}

template <class Product>
void linear_vectors(Team& team, const Call& call, Range panels) {
  const int64_t resident = RESIDENT_BYTES / call.activations.stride;
  constexpr int64_t MAX_ROWS = max_tile_rows<Product>();
  const int64_t block_rows = resident < MAX_ROWS ? MAX_ROWS : resident / MAX_ROWS * MAX_ROWS;
  const int64_t most_rows = round_up(call.num_rows < block_rows ? call.num_rows : block_rows, MAX_ROWS);
  float* sums = static_cast<float*>(team.scratch(static_cast<size_t>(most_rows * PANEL_COLUMNS * 4)));
  for (int64_t begin = 0; begin < call.num_rows; begin += block_rows) {
    const int64_t end = call.num_rows - begin < block_rows ? call.num_rows : begin + block_rows;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel)
      multiply_panel<Product>(call, begin, end, panel, sums);
  }
}

#if REMORA_TILES
// Tile registers: sums 0-3 (row half * 2 + block), activations 4 and 5 by row half, weights 6 and 7 by block.
template <bool TWO_HALVES>
void clear_sums() {
  tile_zero<0>();
  tile_zero<1>();
  if (TWO_HALVES) tile_zero<2>(), tile_zero<3>();
}

template <bool TWO_HALVES>
void store_sums(void* tile) {
  constexpr int64_t ROW_BYTES = PANEL_COLUMNS * 4;
  float* const out = static_cast<float*>(tile);
  tile_store<0>(out, ROW_BYTES);
  tile_store<1>(out + BLOCK_COLUMNS, ROW_BYTES);
  if (TWO_HALVES) {
    tile_store<2>(out + 16 * PANEL_COLUMNS, ROW_BYTES);
    tile_store<3>(out + 16 * PANEL_COLUMNS + BLOCK_COLUMNS, ROW_BYTES);
  }
}

// 64 bytes of k of all rows: 32 bf16 values.
template <bool TWO_HALVES>
REMORA_INLINE void multiply_step(const uint8_t* rows, int64_t stride, const uint8_t* block, int64_t block_bytes) {
  __builtin_prefetch(block + STREAM_AHEAD_BYTES);
  __builtin_prefetch(block + block_bytes + STREAM_AHEAD_BYTES);
  tile_load<4>(rows, stride);
  tile_load<6>(block, 64);
  tile_load<7>(block + block_bytes, 64);
  dot_bf16<0, 4, 6>(), dot_bf16<1, 4, 7>();
  if (TWO_HALVES) {
    tile_load<5>(rows + 16 * stride, stride);
    dot_bf16<2, 5, 6>(), dot_bf16<3, 5, 7>();
  }
}

template <bool TWO_HALVES>
void multiply_tile(const Call& call, int64_t first, const uint8_t* block, int64_t block_bytes, float* tile) {
  clear_sums<TWO_HALVES>();
  const uint8_t* rows = call.row(first);
  for (int64_t at = 0; at < block_bytes; at += 1024, rows += 64)
    multiply_step<TWO_HALVES>(rows, call.activations.stride, block + at, block_bytes);
  store_sums<TWO_HALVES>(tile);
}

// Weights of integers are widened to bf16 a panel at a time.
void linear_tiles(Team& team, const Call& call, Range panels) {
  const PackedLinear& weights = call.weights;
  const bool widens = is_quantised(weights.dtype);
  const int64_t panel_bytes = PANEL_COLUMNS * weights.padded_in * 2;
  uint8_t* wide = widens ? static_cast<uint8_t*>(team.scratch(static_cast<size_t>(panel_bytes))) : nullptr;
  const int64_t resident = RESIDENT_BYTES / call.activations.stride / 32 * 32;
  const int64_t block_rows = resident < 32 ? 32 : resident;
  // Up to 32 rows, tiles are as high as the rows there are; beyond, the last tile computes spare rows.
  const int64_t low = call.num_rows < 16 ? call.num_rows : 16;
  const int64_t high = call.num_rows >= 32 || call.num_rows <= 16 ? 16 : call.num_rows - 16;
  TileConfig config;
  for (const int tile : {0, 1, 4}) config.set(tile, static_cast<int>(low), 64);
  for (const int tile : {2, 3, 5}) config.set(tile, static_cast<int>(high), 64);
  for (const int tile : {6, 7}) config.set(tile, 16, 64);
  tile_configure(config);
  alignas(64) float tile[32 * PANEL_COLUMNS];
  for (int64_t begin = 0; begin < call.num_rows; begin += block_rows) {
    const int64_t end = call.num_rows - begin < block_rows ? call.num_rows : begin + block_rows;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const uint8_t* block = widens ? wide : weights.data + panel * panel_bytes;
      if (widens) widen_panel(weights, panel, wide);
      for (int64_t first = begin; first < end; first += 32) {
        const int64_t count = end - first < 32 ? end - first : 32;
        if (count <= 16) multiply_tile<false>(call, first, block, panel_bytes / 2, tile);
        else multiply_tile<true>(call, first, block, panel_bytes / 2, tile);
        finish_tile(call, first, count, panel, tile);
      }
    }
  }
  tile_release();
}
#endif

}  // namespace

int64_t activation_stride(Dtype weights, int64_t num_in) {
  const int64_t bytes = round_up(num_in, k_unit(weights)) * encoded_bytes(encoding_of(weights));
  return round_up(bytes, 64) | 64;
}

void encode_row(Dtype weights, const float* x, int64_t num_in, const Activations& activations, int64_t row) {
  const Encoding encoding = encoding_of(weights);
  const int64_t bytes = encoded_bytes(encoding);
  uint8_t* out = activations.data + row * activations.stride;
  const int64_t whole = round_up(num_in, LANES);
  if (encoding == Encoding::int16) encode_int16(x, num_in, out, activations.scale + row * num_scales(num_in));
  else for_each_vector(x, num_in, [&](int64_t k, vfloat v) { store_encoded(encoding, out, k, v); });
  // Zero weights stand beyond num_in: any finite activation will do, and stale bytes may not be finite.
  if (whole * bytes < activations.stride)
    __builtin_memset(out + whole * bytes, 0, static_cast<size_t>(activations.stride - whole * bytes));
}

void linear(Team& team, const PackedLinear& weights, const Activations& activations, int64_t num_rows,
            const LinearOutput& output) {
  const Call call{weights, activations, output, num_rows, encoding_of(weights.dtype)};
  const Range panels = team.share(weights.padded_out / PANEL_COLUMNS);
  if (num_rows == 0 || panels.begin == panels.end) return;
  if (weights.dtype == Dtype::fp32) return linear_vectors<ProductFp32>(team, call, panels);
#if REMORA_TILES
  return linear_tiles(team, call, panels);
#else
  if (is_quantised(weights.dtype)) return linear_grouped(weights, activations, num_rows, output, panels);
#if REMORA_DPBF16
  return linear_vectors<ProductBf16Pairs>(team, call, panels);
#else
#if REMORA_VECTOR_BYTES == 32
  if (num_rows >= WIDENED_ROWS) return linear_vectors<ProductBf16Widened>(team, call, panels);
#endif
  return linear_vectors<ProductBf16Wide>(team, call, panels);
#endif
#endif
}

}  // namespace remora::REMORA_LEVEL
