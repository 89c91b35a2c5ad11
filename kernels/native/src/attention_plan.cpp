#include "attention_plan.h"

#include <algorithm>
#include <numeric>

namespace remora {
namespace {

// Items above this share of the work of one thread are cut, so that the last item of a layer is a short one.
constexpr int64_t MIN_ITEMS_PER_THREAD = 4;
// Positions cost about this many rows more than their rows alone: reading and widening K and V.
constexpr int64_t COST_OF_READING_ROWS = 4;

int32_t new_tokens(const Step& step, int32_t sequence) {
  return step.query_start[sequence + 1] - step.query_start[sequence];
}
// Whole chunks that every row of the sequence sees.
int32_t seen_by_all(const Step& step, int32_t sequence) {
  return (step.context_len[sequence] - new_tokens(step, sequence)) / ATTENTION_CHUNK;
}
int32_t chunks_of(int32_t visible) { return (visible + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK; }

}  // namespace

const AttentionWork& AttentionPlan::prepare(const Step& step, const Arena& arena, int32_t num_heads, int32_t tile_rows,
                                            int32_t num_threads) {
  group_ = num_heads / arena.num_kv_heads;
  num_kv_heads_ = arena.num_kv_heads;
  tile_rows_ = tile_rows;
  items_.clear();
  to_parts_.assign(static_cast<size_t>(step.num_sequences), 0);
  order_sequences(step, ATTENTION_CHUNK / arena.block_tokens);
  add_shared_chunks(step);
  add_own_chunks(step, num_threads);
  // Longest first, so that threads finish together.
  std::stable_sort(items_.begin(), items_.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
  number_parts(step);
  const int64_t part_floats = static_cast<int64_t>(num_heads) * (arena.head_dim + AttentionWork::PART_SPARE);
  const auto parts_floats = static_cast<size_t>(part_floats * (first_part_.empty() ? 0 : first_part_.back()));
  if (parts_.size() < parts_floats) parts_.resize(parts_floats);
  cursors_.assign(static_cast<size_t>(arena.num_layers) * AttentionWork::CURSOR_STRIDE, 0);
  work_ = {items_.data(),   static_cast<int32_t>(items_.size()), tile_rows,    rows_.data(),
           cursors_.data(), first_part_.data(),                  parts_.data()};
  return work_;
}

void AttentionPlan::order_sequences(const Step& step, int32_t chunk_columns) {
  const auto count = static_cast<size_t>(step.num_sequences);
  order_.resize(count);
  std::iota(order_.begin(), order_.end(), 0);
  common_.assign(count, 0);
  const auto blocks = [&](int32_t sequence) { return step.block_table + 1LL * sequence * step.table_stride; };
  const auto columns = [&](int32_t sequence) { return 1LL * seen_by_all(step, sequence) * chunk_columns; };
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    return std::lexicographical_compare(blocks(a), blocks(a) + columns(a), blocks(b), blocks(b) + columns(b));
  });
  for (size_t place = 0; place + 1 < count; ++place) {
    const int32_t a = order_[place], b = order_[place + 1];
    const int64_t most = std::min(columns(a), columns(b));
    const int64_t same = std::mismatch(blocks(a), blocks(a) + most, blocks(b)).first - blocks(a);
    common_[place] = static_cast<int32_t>(same / chunk_columns);
  }
  rows_.clear();
  visible_.clear();
  first_row_.assign(1, 0);
  for (const int32_t sequence : order_) {
    for (int32_t token = step.query_start[sequence]; token < step.query_start[sequence + 1]; ++token)
      for (int32_t head = 0; head < group_; ++head) {
        rows_.push_back(token * group_ + head);
        visible_.push_back(step.positions[token] + 1);
      }
    first_row_.push_back(static_cast<int32_t>(rows_.size()));
  }
}

void AttentionPlan::add_tiles(int32_t sequence, int32_t first_row, int32_t end_row, int32_t first_chunk,
                              int32_t end_chunk, bool to_parts) {
  for (int32_t row = first_row; row < end_row; row += tile_rows_) {
    const int32_t num_rows = std::min(tile_rows_, end_row - row);
    const int32_t visible = visible_[static_cast<size_t>(row + num_rows - 1)];
    const int32_t end = std::min(end_chunk, chunks_of(visible));
    const int64_t positions = std::min(visible, end * ATTENTION_CHUNK) - first_chunk * ATTENTION_CHUNK;
    const int64_t cost = positions * (num_rows + COST_OF_READING_ROWS);
    for (int32_t kv_head = 0; kv_head < num_kv_heads_; ++kv_head)
      items_.push_back({sequence, kv_head, row, num_rows, first_chunk, end, to_parts, cost});
  }
}

void AttentionPlan::add_shared_chunks(const Step& step) {
  for (int32_t chunk = 0;; ++chunk) {
    bool any = false;
    for (int32_t place = 0; place + 1 < step.num_sequences; ++place) {
      const int32_t first = place;
      while (common_[static_cast<size_t>(place)] > chunk) ++place;  // the last place has nothing in common with a next
      if (place == first) continue;
      any = true;
      for (int32_t i = first; i <= place; ++i) to_parts_[static_cast<size_t>(order_[static_cast<size_t>(i)])] = 1;
      add_tiles(order_[static_cast<size_t>(first)], first_row_[static_cast<size_t>(first)],
                first_row_[static_cast<size_t>(place) + 1], chunk, chunk + 1, true);
    }
    if (!any) return;
  }
}

void AttentionPlan::add_own_chunks(const Step& step, int32_t num_threads) {
  const size_t first_own = items_.size();
  for (size_t place = 0; place < order_.size(); ++place) {
    const int32_t sequence = order_[place];
    const int32_t shared = std::max(common_[place], place == 0 ? 0 : common_[place - 1]);
    add_tiles(sequence, first_row_[place], first_row_[place + 1], shared, chunks_of(step.context_len[sequence]),
              to_parts_[static_cast<size_t>(sequence)] != 0);
  }
  int64_t total = 0;
  for (const AttentionItem& item : items_) total += item.cost;
  const int64_t largest = num_threads > 1 ? total / (num_threads * MIN_ITEMS_PER_THREAD) : total;
  const auto splits = [&](const AttentionItem& item) {
    return item.cost > largest && item.end_chunk - item.first_chunk > 1;
  };
  for (const AttentionItem& item : items_)
    if (splits(item)) to_parts_[static_cast<size_t>(item.sequence)] = 1;
  for (size_t index = first_own, count = items_.size(); index < count; ++index) {
    items_[index].to_parts = to_parts_[static_cast<size_t>(items_[index].sequence)];
    if (splits(items_[index])) split(index);
  }
}

void AttentionPlan::split(size_t index) {
  AttentionItem item = items_[index];
  const int32_t end = item.end_chunk;
  const int64_t whole = 1LL * ATTENTION_CHUNK * (item.num_rows + COST_OF_READING_ROWS);
  int64_t rest = item.cost;
  for (item.end_chunk = item.first_chunk + 1; item.end_chunk < end; ++item.first_chunk, ++item.end_chunk) {
    item.cost = whole;
    items_.push_back(item);
    rest -= whole;
  }
  item.cost = rest;
  items_[index] = item;
}

void AttentionPlan::number_parts(const Step& step) {
  first_part_.assign(static_cast<size_t>(step.num_tokens) + 1, -1);
  int64_t count = 0;
  for (int32_t sequence = 0; sequence < step.num_sequences; ++sequence) {
    if (to_parts_[static_cast<size_t>(sequence)] == 0) continue;
    for (int32_t token = step.query_start[sequence]; token < step.query_start[sequence + 1]; ++token) {
      first_part_[static_cast<size_t>(token)] = count;
      count += chunks_of(step.positions[token] + 1);
    }
  }
  first_part_.back() = count;
}

}  // namespace remora
