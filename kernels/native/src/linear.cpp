#include "linear.h"

#include <type_traits>

#include "encodings.h"
#include "linear_finish.h"
#include "linear_grouped.h"
#include "micro_kernels.h"
#include "simd.h"
#include "tiles.h"

namespace remora::REMORA_LEVEL {
namespace {

// Rows from which on it is worth widening a slice of bf16 weights once, for all row tiles.
constexpr int64_t WIDENED_ROWS = 5;
// Lines of a panel's two blocks that stay in the level-1 cache: 16 KiB.
constexpr int64_t SLICE_LINES = 128;

// What is common to all tiles of one call.
struct Call {
  const PackedLinear& weights;
  const Activations& activations;
  const LinearOutput& output;
  int64_t num_rows;

  const uint8_t* row(int64_t index) const { return activations.data + index * activations.stride; }
};

// Turns the sums of a tile, in rows of PANEL_COLUMNS, into outputs.
void finish_tile(const Call& call, int64_t first_row, int64_t num_rows, int64_t panel, float* tile) {
  for (int64_t r = 0; r < num_rows; ++r)
    finish_row(call.weights, call.output, first_row + r, panel, tile + r * PANEL_COLUMNS);
}

// Whether the tiles read a widened copy of the panel; see ProductBf16Widened.
template <class Product>
constexpr bool is_widened() {
#if REMORA_VECTOR_BYTES == 32
  return std::is_same_v<Product, ProductBf16Widened>;
#else
  return false;
#endif
}

template <class Product>
struct Products {
  using Function = void (*)(const MicroTile&);
  // 6 would fit weights that are widened on the way too, but gcc then moves registers around: 20 % slower than 4.
  static constexpr int MAX_ROWS = REMORA_VECTOR_BYTES == 32 && Product::PARTS == 2 ? 4 : MOST_TILE_ROWS;
  template <int ROWS, int BLOCKS>
  static constexpr Function run = sum_products<Product, ROWS, BLOCKS>;
};

// Rows [begin, end) against one panel. Several row tiles take the panel in slices that stay in the level-1 cache while
// the tiles pass by; their sums stand in `sums`, each tile at its own multiple of MAX_ROWS, since spare rows are
// summed too.
template <class Product>
void multiply_panel(const Call& call, int64_t begin, int64_t end, int64_t panel_index, float* sums) {
  constexpr int64_t MAX_ROWS = Products<Product>::MAX_ROWS;
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
  // One row keeps up with memory: a little ahead is enough. More rows compute between two lines, and run late then.
  const int64_t ahead = count == 1 ? STREAM_AHEAD_BYTES / 2 : stream_ahead(panel_bytes);
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
      const int64_t first = tile_begin(count, num_tiles, t),
                    last = tile_begin(count, num_tiles, t + 1);
      const auto chosen = tile_kernel<Products<Product>>(last - first);
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
                       {next, LINE_BYTES / (num_tiles * WIDTH), block_bytes}};
        if (num_tiles == 1) part.prefetch = {part.block + ahead, LINE_BYTES, block_bytes};
        next += part.prefetch.bytes_per_line * part.lines;
        chosen.run(part);
      }
    }
  }
  for (int64_t t = 0; t < num_tiles; ++t) {
    const int64_t first = tile_begin(count, num_tiles, t),
                    last = tile_begin(count, num_tiles, t + 1);
    finish_tile(call, begin + first, last - first, panel_index, sums + t * MAX_ROWS * PANEL_COLUMNS);
  }
}

template <class Product>
void linear_vectors(Team& team, const Call& call, Range panels) {
  constexpr int64_t MAX_ROWS = Products<Product>::MAX_ROWS;
  const int64_t block_rows = resident_rows(call.activations.stride, MAX_ROWS);
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
  const int64_t block_rows = resident_rows(call.activations.stride, 32);
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
  if (encoding == Encoding::int16 || encoding == Encoding::int8)
    encode_groups(x, num_in, out, activations.scale + row * num_scales(num_in));
  else
    for_each_vector(x, num_in, [&](int64_t k, vfloat v) { store_encoded(encoding, out, k, v); });
  // Zero weights stand beyond num_in: any finite activation will do, and stale bytes may not be finite.
  if (whole * bytes < activations.stride)
    __builtin_memset(out + whole * bytes, 0, static_cast<size_t>(activations.stride - whole * bytes));
}

void linear(Team& team, const PackedLinear& weights, const Activations& activations, int64_t num_rows,
            const LinearOutput& output) {
  const Call call{weights, activations, output, num_rows};
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
