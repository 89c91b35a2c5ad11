#include "attention.h"

#include <cmath>

#include "attention_kernels.h"
#include "attention_tile.h"
#include "threads.h"

namespace remora::REMORA_LEVEL {
namespace {

// How a chunk is computed.
enum class Path { portable, pairs, bytes, tiles };

Path path_of(const Arena& arena) {
  if (has_bytes() && is_quantised(arena.k_dtype) && is_quantised(arena.v_dtype)) return Path::bytes;
  if (arena.k_dtype != Dtype::bf16 || arena.v_dtype != Dtype::bf16) return Path::portable;
  return has_tiles() ? Path::tiles : has_pairs() ? Path::pairs : Path::portable;
}

size_t chunk_scratch_bytes(const Arena& arena) {
  switch (path_of(arena)) {
    case Path::tiles: return amx_chunk_scratch_bytes();
    case Path::pairs: return pairs_scratch_bytes(arena);
    case Path::bytes: return bytes_scratch_bytes(arena);
    case Path::portable: return portable_chunk_scratch_bytes(arena);
  }
  return 0;
}

float exp2_of_negative(float x) { return remora::REMORA_LEVEL::exp2_of_negative(splat(x))[0]; }

// Takes over `part`, which covers later positions than `whole`.
void merge(Part whole, Part part, int rows, int dim) {
  for (int row = 0; row < rows; ++row) {
    float* out = whole.out + row * dim;
    const float* added = part.out + row * dim;
    if (part.sum[row] == 0) continue;  // sees nothing there
    if (whole.sum[row] == 0) {
      __builtin_memcpy(out, added, sizeof(float) * static_cast<size_t>(dim));
      whole.maximum[row] = part.maximum[row];
      whole.sum[row] = part.sum[row];
      continue;
    }
    const float a = whole.maximum[row], b = part.maximum[row];
    const float maximum = a > b ? a : b;
    const float keep = exp2_of_negative(a - maximum), take = exp2_of_negative(b - maximum);
    const vfloat keep_all = splat(keep), take_all = splat(take);
    for (int d = 0; d < dim; d += LANES) store(out + d, fma(load(out + d), keep_all, load(added + d) * take_all));
    whole.maximum[row] = maximum;
    whole.sum[row] = whole.sum[row] * keep + part.sum[row] * take;
  }
}

// What a call and its work say about rows; see AttentionItem for their numbers.
class Rows {
 public:
  Rows(const Step& step, const Arena& arena, const AttentionCall& call, const AttentionWork& work)
      : step_(step), arena_(arena), call_(call), work_(work), group_(call.num_heads / arena.num_kv_heads) {}

 protected:
  int32_t visible(int64_t token) const { return step_.positions[token] + 1; }

  // The part of one row and chunk.
  Part shared_part(int64_t token, int32_t head, int32_t chunk) const {
    const int64_t stride = arena_.head_dim + AttentionWork::PART_SPARE;
    return {work_.parts + ((work_.first_part[token] + chunk) * call_.num_heads + head) * stride, 1, arena_.head_dim};
  }

  void write(int64_t token, int32_t head, const float* values, float maximum, float sum) const {
    float* out = call_.out + token * call_.out_stride + head * arena_.head_dim;
    const vfloat inverse = splat(1.0f / sum);
    for (int32_t d = 0; d < arena_.head_dim; d += LANES) store(out + d, load(values + d) * inverse);
    if (call_.lse != nullptr) call_.lse[token * call_.num_heads + head] = maximum * LN_2 + logf(sum);
  }

  const Step& step_;
  const Arena& arena_;
  const AttentionCall& call_;
  const AttentionWork& work_;
  const int32_t group_;
};

// One rank's part in the attention of a layer.
class Worker : Rows {
 public:
  Worker(Team& team, const Step& step, const Arena& arena, const AttentionCall& call, const AttentionWork& work)
      : Rows(step, arena, call, work), path_(path_of(arena)), team_size_(team.size) {
    const size_t tile_rows = static_cast<size_t>(work.tile_rows), dim = static_cast<size_t>(arena.head_dim);
    const size_t part_bytes = align(sizeof(float) * tile_rows * (dim + 2));
    const size_t q_bytes = align(sizeof(float) * tile_rows * dim);
    uint8_t* memory = static_cast<uint8_t*>(team.scratch(2 * part_bytes + q_bytes + chunk_scratch_bytes(arena)));
    whole_memory_ = reinterpret_cast<float*>(memory);
    part_memory_ = reinterpret_cast<float*>(memory + part_bytes);
    q_ = reinterpret_cast<float*>(memory + 2 * part_bytes);
    chunk_scratch_ = memory + 2 * part_bytes + q_bytes;
  }

  void run() {
    if (path_ == Path::tiles) load_tile_config();
    claim_items();
    if (path_ == Path::tiles) unload_tile_config();
  }

 private:
  static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

  void claim_items() {
    int32_t* cursor = work_.cursors + call_.layer * AttentionWork::CURSOR_STRIDE;
    for (;;) {
      const int32_t index = __atomic_fetch_add(cursor, 1, __ATOMIC_RELAXED);
      if (index >= work_.num_items) return;
      // Most likely the next of ours; a guess that only warms the cache.
      const int32_t next = index + team_size_;
      run_item(work_.items[index], next < work_.num_items ? work_.items + next : nullptr);
    }
  }

  Part part_at(float* memory) const { return {memory, work_.tile_rows, arena_.head_dim}; }
  int64_t token_of(const AttentionItem& item, int32_t row) const { return work_.rows[item.first_row + row] / group_; }
  int32_t head_of(const AttentionItem& item, int32_t row) const {
    return item.kv_head * group_ + work_.rows[item.first_row + row] % group_;
  }

  void run_item(const AttentionItem& item, const AttentionItem* next) {
    Tile tile(step_, arena_, item.sequence, call_.layer, item.kv_head);
    tile.num_rows = item.num_rows;
    tile.scale_log2 = call_.scale * LOG2_E;
    tile.q = q_;
    const size_t row_bytes = sizeof(float) * static_cast<size_t>(arena_.head_dim);
    for (int32_t row = 0; row < item.num_rows; ++row) {
      const int64_t token = token_of(item, row);
      tile.visible[row] = visible(token);
      const float* q = call_.q + token * call_.q_stride + head_of(item, row) * arena_.head_dim;
      __builtin_memcpy(q_ + row * arena_.head_dim, q, row_bytes);
    }
    if (path_ == Path::tiles) amx_prepare_tile(tile, chunk_scratch_);
    if (path_ == Path::pairs) pairs_prepare_tile(tile, chunk_scratch_);
    if (path_ == Path::bytes) bytes_prepare_tile(tile, chunk_scratch_);
    const AttentionItem& later = next == nullptr ? item : *next;
    const HeadBlocks later_blocks(step_, arena_, later.sequence, call_.layer, later.kv_head);
    const Ahead after = next == nullptr ? Ahead{} : ahead_of(later, later.first_chunk, later_blocks);
    const Part whole = part_at(whole_memory_), part = part_at(part_memory_);
    for (int32_t row = 0; row < item.num_rows; ++row) whole.sum[row] = 0;
    for (int32_t chunk = item.first_chunk; chunk < item.end_chunk; ++chunk) {
      run_chunk(tile, chunk, chunk + 1 < item.end_chunk ? ahead_of(item, chunk + 1, tile.blocks) : after, part);
      if (item.to_parts != 0) share(item, tile, chunk, part);
      else merge(whole, part, item.num_rows, arena_.head_dim);
    }
    for (int32_t row = 0; row < item.num_rows && item.to_parts == 0; ++row)
      write(token_of(item, row), head_of(item, row), whole.out + row * arena_.head_dim, whole.maximum[row],
            whole.sum[row]);
  }

  Ahead ahead_of(const AttentionItem& item, int32_t chunk, const HeadBlocks& blocks) const {
    const int32_t rest = step_.context_len[item.sequence] - chunk * ATTENTION_CHUNK;
    return {&blocks, chunk, rest < ATTENTION_CHUNK ? rest : ATTENTION_CHUNK};
  }

  void run_chunk(const Tile& tile, int32_t chunk, const Ahead& ahead, Part part) {
    switch (path_) {
      case Path::tiles: return amx_chunk(tile, chunk, part, chunk_scratch_);
      case Path::pairs: return pairs_chunk(tile, chunk, ahead, part, chunk_scratch_);
      case Path::bytes: return bytes_chunk(tile, chunk, ahead, part, chunk_scratch_);
      case Path::portable: return portable_chunk(tile, chunk, part, chunk_scratch_);
    }
  }

  // A token has parts only for the chunks that it sees.
  void share(const AttentionItem& item, const Tile& tile, int32_t chunk, Part part) const {
    const int32_t dim = arena_.head_dim;
    for (int32_t row = 0; row < item.num_rows; ++row) {
      if (tile.visible_in_chunk(chunk, row) == 0) continue;
      const Part target = shared_part(token_of(item, row), head_of(item, row), chunk);
      __builtin_memcpy(target.out, part.out + row * dim, sizeof(float) * static_cast<size_t>(dim));
      *target.maximum = part.maximum[row];
      *target.sum = part.sum[row];
    }
  }

  const Path path_;
  const int32_t team_size_;
  float *whole_memory_, *part_memory_, *q_;
  uint8_t* chunk_scratch_;
};

class Merger : Rows {
 public:
  using Rows::Rows;

  void run(Range tokens) const {
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      if (work_.first_part[token] < 0) continue;
      const int32_t num_chunks = (visible(token) + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK;
      for (int32_t head = 0; head < call_.num_heads; ++head) {
        const Part whole = shared_part(token, head, 0);
        for (int32_t chunk = 1; chunk < num_chunks; ++chunk)
          merge(whole, shared_part(token, head, chunk), 1, arena_.head_dim);
        write(token, head, whole.out, *whole.maximum, *whole.sum);
      }
    }
  }
};

}  // namespace

int32_t attention_tile_rows(const Arena& arena) {
  switch (path_of(arena)) {
    case Path::tiles: return 16;
    case Path::pairs:
    case Path::bytes: return MAX_TILE_ROWS;
    case Path::portable: return 24;
  }
  return 0;
}

void attention(Team& team, const Step& step, const Arena& arena, const AttentionCall& call,
               const AttentionWork& work) {
  Worker(team, step, arena, call, work).run();
}

void merge_attention(Team& team, const Step& step, const Arena& arena, const AttentionCall& call,
                     const AttentionWork& work) {
  Merger(step, arena, call, work).run(team.share(step.num_tokens));
}

}  // namespace remora::REMORA_LEVEL
