#include "attention_plan.h"

#include <algorithm>

namespace remora {
namespace {

// Tiles above this share of the work of one thread are cut, so that the last item of a layer is a short one.
constexpr int64_t MIN_ITEMS_PER_THREAD = 4;
// Positions cost about this many rows more than their rows alone: reading and widening K and V.
constexpr int64_t COST_OF_READING_ROWS = 4;

int64_t cost(const AttentionItem& item) {
  return static_cast<int64_t>(item.end_chunk - item.first_chunk) * (item.num_rows + COST_OF_READING_ROWS);
}

}  // namespace

const AttentionWork& AttentionPlan::prepare(const Step& step, const Arena& arena, int32_t num_heads, int32_t tile_rows,
                                            int32_t num_threads) {
  whole_tiles_.clear();
  const int32_t group = num_heads / arena.num_kv_heads;
  for (int32_t sequence = 0; sequence < step.num_sequences; ++sequence) {
    const int32_t num_tokens = step.query_start[sequence + 1] - step.query_start[sequence];
    const int32_t before = step.context_len[sequence] - num_tokens;
    for (int32_t kv_head = 0; kv_head < arena.num_kv_heads; ++kv_head) {
      for (int32_t row = 0; row < num_tokens * group; row += tile_rows) {
        const int32_t num_rows = std::min(tile_rows, num_tokens * group - row);
        const int32_t visible = before + (row + num_rows - 1) / group + 1;
        const int32_t num_chunks = (visible + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK;
        whole_tiles_.push_back({sequence, kv_head, row, num_rows, 0, num_chunks, num_chunks, -1});
      }
    }
  }
  const int64_t num_parts = split_large_tiles(num_threads);
  // Longest first, so that threads finish together.
  std::stable_sort(items_.begin(), items_.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
  cursors_.assign(static_cast<size_t>(arena.num_layers) * AttentionWork::CURSOR_STRIDE, 0);
  done_.assign(first_part_.size(), 0);
  const int64_t part_floats = static_cast<int64_t>(tile_rows) * (arena.head_dim + 2);
  const size_t parts_floats = static_cast<size_t>(num_parts * part_floats);
  if (parts_.size() < parts_floats) parts_.resize(parts_floats);
  work_ = {items_.data(),      static_cast<int32_t>(items_.size()), tile_rows, cursors_.data(), done_.data(),
           first_part_.data(), parts_.data(),                       part_floats};
  return work_;
}

int64_t AttentionPlan::split_large_tiles(int32_t num_threads) {
  int64_t total = 0;
  for (const AttentionItem& tile : whole_tiles_) total += cost(tile);
  const int64_t largest = num_threads > 1 ? total / (num_threads * MIN_ITEMS_PER_THREAD) : total;
  int64_t num_parts = 0;
  items_.clear();
  first_part_.clear();
  for (AttentionItem tile : whole_tiles_) {
    if (tile.num_chunks == 1 || cost(tile) <= largest) {
      items_.push_back(tile);
      continue;
    }
    tile.split = static_cast<int32_t>(first_part_.size());
    first_part_.push_back(num_parts);
    num_parts += tile.num_chunks;
    for (int32_t chunk = 0; chunk < tile.num_chunks; ++chunk) {
      tile.first_chunk = chunk;
      tile.end_chunk = chunk + 1;
      items_.push_back(tile);
    }
  }
  return num_parts;
}

}  // namespace remora
