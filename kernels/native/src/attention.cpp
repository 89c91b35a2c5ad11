#include "attention.h"

#include <cmath>

#include "attention_kernels.h"
#include "attention_tile.h"
#include "threads.h"

namespace remora::REMORA_LEVEL {
namespace {

bool uses_tiles(const Arena& arena) {
  return has_tiles() && arena.k_dtype == Dtype::bf16 && arena.v_dtype == Dtype::bf16;
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

// One rank's part in the attention of a layer.
class Worker {
 public:
  Worker(Team& team, const Step& step, const Arena& arena, const AttentionCall& call, const AttentionWork& work)
      : step_(step), arena_(arena), call_(call), work_(work), group_(call.num_heads / arena.num_kv_heads) {
    const size_t part_bytes = align(sizeof(float) * static_cast<size_t>(work.part_floats));
    const size_t q_bytes = sizeof(float) * static_cast<size_t>(MAX_TILE_ROWS) * static_cast<size_t>(arena.head_dim);
    const size_t chunk_bytes =
        uses_tiles(arena) ? amx_chunk_scratch_bytes() : portable_chunk_scratch_bytes(arena);
    uint8_t* memory = static_cast<uint8_t*>(team.scratch(2 * part_bytes + q_bytes + chunk_bytes));
    whole_memory_ = reinterpret_cast<float*>(memory);
    part_memory_ = reinterpret_cast<float*>(memory + part_bytes);
    q_ = reinterpret_cast<float*>(memory + 2 * part_bytes);
    chunk_scratch_ = memory + 2 * part_bytes + q_bytes;
  }

  void run() {
    if (uses_tiles(arena_)) load_tile_config();
    claim_items();
    if (uses_tiles(arena_)) unload_tile_config();
  }

 private:
  void claim_items() {
    int32_t* cursor = work_.cursors + call_.layer * AttentionWork::CURSOR_STRIDE;
    for (;;) {
      const int32_t index = __atomic_fetch_add(cursor, 1, __ATOMIC_RELAXED);
      if (index >= work_.num_items) return;
      run_item(work_.items[index]);
    }
  }

  static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

  Part part_at(float* memory) const { return Part(memory, work_.tile_rows, arena_.head_dim); }
  int64_t token_of(const AttentionItem& item, int32_t row) const {
    return step_.query_start[item.sequence] + (item.first_row + row) / group_;
  }
  int32_t head_of(const AttentionItem& item, int32_t row) const {
    return item.kv_head * group_ + (item.first_row + row) % group_;
  }

  void run_item(const AttentionItem& item) {
    Tile tile(step_, arena_, item.sequence, call_.layer, item.kv_head);
    tile.num_rows = item.num_rows;
    tile.scale_log2 = call_.scale * LOG2_E;
    tile.q = q_;
    const int32_t before = step_.context_len[item.sequence] -
                           (step_.query_start[item.sequence + 1] - step_.query_start[item.sequence]);
    const size_t row_bytes = sizeof(float) * static_cast<size_t>(arena_.head_dim);
    for (int32_t row = 0; row < item.num_rows; ++row) {
      tile.visible[row] = before + (item.first_row + row) / group_ + 1;
      const float* q = call_.q + token_of(item, row) * call_.q_stride + head_of(item, row) * arena_.head_dim;
      __builtin_memcpy(q_ + row * arena_.head_dim, q, row_bytes);
    }
    if (uses_tiles(arena_)) amx_prepare_tile(tile, chunk_scratch_);
    if (item.split < 0) {
      const Part whole = part_at(whole_memory_);
      clear(whole, item.num_rows);
      for (int32_t chunk = item.first_chunk; chunk < item.end_chunk; ++chunk) {
        const Part part = part_at(part_memory_);
        run_chunk(tile, chunk, part);
        merge(whole, part, item.num_rows, arena_.head_dim);
      }
      write(item, whole);
      return;
    }
    run_chunk(tile, item.first_chunk, part_at(shared_part(item, item.first_chunk)));
    int32_t* done = work_.done + item.split;
    // Release our part to the last finisher, acquire the others' if it is us.
    if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < item.num_chunks) return;
    __atomic_store_n(done, 0, __ATOMIC_RELAXED);
    const Part whole = part_at(whole_memory_);
    clear(whole, item.num_rows);
    for (int32_t chunk = 0; chunk < item.num_chunks; ++chunk)
      merge(whole, part_at(shared_part(item, chunk)), item.num_rows, arena_.head_dim);
    write(item, whole);
  }

  float* shared_part(const AttentionItem& item, int32_t chunk) const {
    return work_.parts + (work_.first_part[item.split] + chunk) * work_.part_floats;
  }

  void run_chunk(const Tile& tile, int32_t chunk, Part part) {
    if (uses_tiles(arena_)) {
      amx_chunk(tile, chunk, part, chunk_scratch_);
    } else {
      portable_chunk(tile, chunk, part, chunk_scratch_);
    }
  }

  static void clear(Part whole, int32_t rows) {
    for (int32_t row = 0; row < rows; ++row) whole.sum[row] = 0;
  }

  void write(const AttentionItem& item, Part whole) const {
    for (int32_t row = 0; row < item.num_rows; ++row) {
      const int64_t token = token_of(item, row);
      const int32_t head = head_of(item, row);
      float* out = call_.out + token * call_.out_stride + head * arena_.head_dim;
      const vfloat inverse = splat(1.0f / whole.sum[row]);
      for (int32_t d = 0; d < arena_.head_dim; d += LANES)
        store(out + d, load(whole.out + row * arena_.head_dim + d) * inverse);
      if (call_.lse != nullptr)
        call_.lse[token * call_.num_heads + head] = whole.maximum[row] * LN_2 + logf(whole.sum[row]);
    }
  }

  const Step& step_;
  const Arena& arena_;
  const AttentionCall& call_;
  const AttentionWork& work_;
  const int32_t group_;
  float *whole_memory_, *part_memory_, *q_;
  uint8_t* chunk_scratch_;
};

}  // namespace

int32_t attention_tile_rows(const Arena& arena) { return uses_tiles(arena) ? 16 : 24; }

void attention(Team& team, const Step& step, const Arena& arena, const AttentionCall& call,
               const AttentionWork& work) {
  Worker(team, step, arena, call, work).run();
}

}  // namespace remora::REMORA_LEVEL
