#include "linear_grouped.h"

#include "encodings.h"
#include "linear_finish.h"
#include "micro_grouped.h"
#include "simd.h"

namespace remora::REMORA_LEVEL {

#if !REMORA_TILES
namespace {

template <class Product, bool MINIMUM>
struct GroupedProducts {
  using Function = void (*)(const GroupedTile&);
  static constexpr int MAX_ROWS = REMORA_VECTOR_BYTES == 64 ? 8 : MOST_TILE_ROWS;
  template <int ROWS, int BLOCKS>
  static constexpr Function run = sum_grouped<Product, MINIMUM, ROWS, BLOCKS>;
};

template <class Product, bool MINIMUM>
void multiply(const PackedLinear& weights, const Activations& activations, int64_t num_rows, const LinearOutput& output,
              Range panels) {
  const int64_t groups = num_groups(weights.num_in), panel_bytes = weights.panel_bytes();
  const int64_t pairs = group_pairs(weights.num_in);
  constexpr int64_t MAX_ROWS = GroupedProducts<Product, MINIMUM>::MAX_ROWS;
  const int64_t block_rows = resident_rows(activations.stride, MAX_ROWS);
  alignas(64) float tile[MAX_ROWS * PANEL_COLUMNS];
  for (int64_t begin = 0; begin < num_rows; begin += block_rows) {
    const int64_t end = num_rows - begin < block_rows ? num_rows : begin + block_rows, count = end - begin;
    const int64_t num_tiles = (count + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const uint8_t* data = weights.data + panel * panel_bytes;
      // With one tile the weights are read once: the stream is fetched ahead. Else each tile fetches a share of the
      // next panel.
      const int64_t ahead = num_tiles == 1 ? stream_ahead(panel_bytes) : panel_bytes;
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t first = begin + tile_begin(count, num_tiles, t),
                      last = begin + tile_begin(count, num_tiles, t + 1);
        const auto chosen = tile_kernel<GroupedProducts<Product, MINIMUM>>(last - first);
        for (int64_t b = 0; b < 2; b += chosen.num_blocks) {
          const int64_t column = panel * groups * PANEL_COLUMNS + b * BLOCK_COLUMNS;
          const uint8_t* block = data + b * panel_bytes / 2;
          const Prefetch prefetch{block + ahead + panel_bytes / 2 * t / num_tiles / LINE_BYTES * LINE_BYTES,
                                  LINE_BYTES / num_tiles, panel_bytes / 2};
          chosen.run({activations.data + first * activations.stride, activations.stride,
                      activations.scale + first * num_scales(weights.num_in), num_scales(weights.num_in), block,
                      panel_bytes / 2, weights.scale + column,
                      MINIMUM ? weights.minimum + (panel * pairs * PANEL_COLUMNS + b * BLOCK_COLUMNS) * 2 : nullptr,
                      MINIMUM ? weights.minimum_step + panel * PANEL_COLUMNS + b * BLOCK_COLUMNS : nullptr, groups,
                      tile + b * BLOCK_COLUMNS, prefetch});
        }
        for (int64_t row = first; row < last; ++row) {
          float* sums = tile + (row - first) * PANEL_COLUMNS;
#if REMORA_VNNI
          finish_sums<Product>(parts_of(activations.scale + row * num_scales(weights.num_in), groups), data,
                               panel_bytes / 2, weights.scale + panel * groups * PANEL_COLUMNS, sums);
#endif
          finish_row(weights, output, row, panel, sums);
        }
      }
    }
  }
}

}  // namespace

void linear_grouped(const PackedLinear& weights, const Activations& activations, int64_t num_rows,
                    const LinearOutput& output, Range panels) {
  using Multiply = void (*)(const PackedLinear&, const Activations&, int64_t, const LinearOutput&, Range);
  static constexpr Multiply CHOICES[2][2] = {{multiply<ProductGroupedInt8, false>, multiply<ProductGroupedInt8, true>},
                                             {multiply<ProductGroupedInt4, false>, multiply<ProductGroupedInt4, true>}};
  CHOICES[weights.dtype == Dtype::int4][weights.minimum != nullptr](weights, activations, num_rows, output, panels);
}

#else
void widen_panel(const PackedLinear& weights, int64_t panel, uint8_t* out) {
  static_assert(LANES == BLOCK_COLUMNS, "a vector is a line");
  const int64_t groups = num_groups(weights.num_in), block_bytes = weights.panel_bytes() / 2;
  const bool is_int8 = weights.dtype == Dtype::int8;
  const int pairs_per_line = is_int8 ? 2 : 4;
  for (int64_t b = 0; b < 2; ++b) {
    const uint8_t* line = weights.data + panel * weights.panel_bytes() + b * block_bytes;
    const int64_t column = panel * groups * PANEL_COLUMNS + b * BLOCK_COLUMNS;
    for (int64_t group = 0; group < groups; ++group) {
      const vfloat scale = load_fp16(weights.scale + column + group * PANEL_COLUMNS);
      vfloat minimum = {};
      if (weights.minimum != nullptr) {
        const int64_t pair = panel * group_pairs(weights.num_in) + group / 2, first = b * BLOCK_COLUMNS;
        const vint codes = load_as<vint>(weights.minimum + (pair * PANEL_COLUMNS + first) * 2);
        minimum = __builtin_convertvector(group % 2 == 0 ? (codes << 16) >> 16 : codes >> 16, vfloat) *
                  load(weights.minimum_step + panel * PANEL_COLUMNS + first);
      }
      for (int64_t pair = 0; pair < INPUT_GROUP / 2; ++pair, out += LINE_BYTES) {
        const int part = static_cast<int>(pair % pairs_per_line);
        const vint raw = (vint)(load_as<vuint>(line) ^ (is_int8 ? 0x80808080u : 0u));
        // Code 2p stands at this bit, code 2p + 1 in the next byte.
        const int bit = 16 * (part % 2) + 4 * (part / 2);
        const vint even = is_int8 ? (raw << (24 - bit)) >> 24 : (raw >> bit) & 15;
        const vint odd = is_int8 ? (raw << (16 - bit)) >> 24 : (raw >> (bit + 8)) & 15;
        const vuint low = round_bf16(fma(__builtin_convertvector(even, vfloat), scale, minimum)) >> 16;
        const vuint high = round_bf16(fma(__builtin_convertvector(odd, vfloat), scale, minimum));
        store_as(out, low | high);
        if (part == pairs_per_line - 1) line += LINE_BYTES;
      }
    }
  }
}
#endif

}  // namespace remora::REMORA_LEVEL
